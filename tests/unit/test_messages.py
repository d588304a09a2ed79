"""Messages survive the wire unchanged; foreign versions and damaged frames are refused by name."""

import msgspec
import numpy as np
import pytest

from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import (
    NOT_SAMPLED,
    SCHEMA_VERSION,
    BatchRequest,
    CancelRollout,
    Failure,
    ImageSpan,
    MicroBatch,
    PolicyVersion,
    RankBatch,
    Rollout,
    RolloutDone,
    RoutedExperts,
    RunRollout,
    Sample,
    StepReport,
    WorkerHello,
    decode,
    encode,
)

V = PolicyVersion(2, 7)
SAMPLE = Sample(
    sample_id="r/0",
    source="words",
    token_ids=Array.of([1, 151_935], "i4"),
    mask=Array.of([False, True], "bool"),
    logprobs=Array.of([0, -1.5], "f4"),
    versions=Array.of([NOT_SAMPLED, V.pack()], "i8"),
    advantages=Array.of([0, 0.25], "f4"),
    adapter="games",
    routed_experts=RoutedExperts.of(np.array([[[0, 3]], [[-1, -1]]])),
    images=[ImageSpan(0, 1, "d")],
)
MICRO = MicroBatch(
    token_ids=Array.of([1, 2, 3], "i4"),
    mask=Array.of([0, 1, 1], "bool"),
    logprobs=Array.of([0, -1, -2], "f4"),
    versions=Array.of([-1, 0, 0], "i8"),
    advantages=Array.of([0, 1, 1], "f4"),
    temperatures=Array.of([1, 1, 1], "f4"),
    seq_lens=[2, 1],
    sources=["words", "words"],
    images=[ImageSpan(1, 1, "d")],
)
MESSAGES = [
    WorkerHello(worker="env-0", source="words", capacity=8, num_tasks=None, running=["r"]),
    RunRollout(rollout_id="r", task_index=3, base_url="http://h:1", model="policy", version=V,
               sampling={"temperature": 1.0, "max_tokens": 16, "stop": None}),
    CancelRollout(rollout_id="r"),
    RolloutDone(worker="env-0", rollout=Rollout(rollout_id="r", source="words", task_id="t", samples=[SAMPLE],
                images={"d": b"\x89PNG"}, reward=1.0), messages='[{"role": "user"}]'),
    RolloutDone(worker="env-0", rollout=Rollout(rollout_id="r", source="words", task_id="t",
                failure=Failure(kind="inference", type="Timeout", message="late"))),
    BatchRequest(rank=0, world=2, step=4, checkpointed=3, report=StepReport(step=3, metrics={"loss": 0.5})),
    RankBatch(step=4, rank=1, micro_batches=[MICRO], sample_ids=["r/0"], journal_offset=99,
              images={"d": b"\x89PNG"}),
    RankBatch(step=5, rank=1, micro_batches=[], sample_ids=[], journal_offset=99, last=True),
]  # fmt: skip


@pytest.mark.parametrize(("experts", "dtype"), [([0, 255], "u1"), ([0, 256], "i2"), ([-1, 3], "i2")])
def test_experts_take_a_byte_each_where_that_holds_them(experts, dtype):
    packed = RoutedExperts.of(np.array(experts).reshape(1, 1, 2))
    assert packed.ids.dtype == dtype
    assert packed.numpy().tolist() == [[experts]]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message):
    frames = encode(message)
    assert [type(frame) for frame in frames] == [bytes, bytes]
    assert decode(frames) == message


@pytest.mark.parametrize("version", [b"0", b"%d" % (SCHEMA_VERSION + 1), b"", b"\xff"])
def test_unknown_schema_version_is_refused(version):
    with pytest.raises(SchemaMismatch, match="one installation of prime_hpc"):
        decode([version, encode(MESSAGES[0])[1]])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        encode(MESSAGES[3])[1][:-1],
        msgspec.msgpack.encode({"type": "Unheard"}),
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"type": "CancelRollout"}),
        msgspec.msgpack.encode({"type": "CancelRollout", "rollout_id": 1}),
    ],
    ids=["empty", "cut", "unknown type", "no struct", "missing field", "wrong type"],
)
def test_damaged_message_is_refused(payload):
    with pytest.raises(CorruptData, match="not a message of schema"):
        decode([b"%d" % SCHEMA_VERSION, payload])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_frames_is_refused(count):
    with pytest.raises(CorruptData, match=f"2 frames, got {count}"):
        decode([b"1"] * count)


@pytest.mark.parametrize("dtype", ["bool", "i4", "i8", "f4"])
def test_streams_are_little_endian_bytes(dtype):
    array = Array.of([1, 0, 1], dtype)
    native = array.numpy()
    assert array.data == native.astype(native.dtype.newbyteorder("<")).tobytes()
    assert (len(array), native.tolist()) == (3, [1, 0, 1])
    with pytest.raises(ValueError, match="read-only"):
        native[0] = 0


@pytest.mark.parametrize("array", [Array("f4", 2, b"\0" * 7), Array("f8", 1, b"\0" * 8), Array("i8", 1, b"")])
def test_stream_whose_bytes_do_not_fit_is_refused(array):
    with pytest.raises(CorruptData, match=f"a stream of {array.length} x {array.dtype} holds"):
        array.numpy()


def test_stream_has_one_dimension():
    with pytest.raises(ValueError, match="one dimension"):
        Array.of(np.zeros((2, 2)), "f4")


@pytest.mark.parametrize("version", [PolicyVersion(0, 0), V, PolicyVersion(1000, 2**32 - 1)])
def test_version_packs_and_prints_without_loss(version):
    assert PolicyVersion.unpack(version.pack()) == version
    assert PolicyVersion.parse(str(version)) == version
    assert Array.of([version.pack()], "i8").numpy()[0] == version.pack()


def test_versions_are_ordered_by_lineage_then_step():
    assert PolicyVersion(0, 9) < PolicyVersion(1, 2) < PolicyVersion(1, 10)
    assert PolicyVersion(0, 9).pack() < PolicyVersion(1, 2).pack()
    assert str(V) == "2.7"


def test_positions_restart_with_every_sequence():
    assert MICRO.position_ids().tolist() == [0, 1, 0]
