"""Every message two roles exchange. One tagged union, one schema version; an unknown version is refused.

Directions:
    env worker -> orchestrator: WorkerHello, RolloutDone
    orchestrator -> env worker: RunRollout, CancelRollout
    trainer rank -> orchestrator: BatchRequest (asks for a batch and reports the step before it)
    orchestrator -> trainer rank: RankBatch
"""

from typing import Any, TypeVar

import msgspec
import numpy as np

from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.transport.arrays import Array

SCHEMA_VERSION = 1
NOT_SAMPLED = -1
"""Stands in a version stream where a token was not sampled by the policy."""
_LINEAGE_SHIFT = 32


class PolicyVersion(msgspec.Struct, array_like=True, frozen=True, order=True):
    """Weights after `step` optimiser steps on `lineage`; step 0 is the base model."""

    lineage: int
    step: int

    def pack(self) -> int:
        """One int64 for a per-token version stream."""
        return (self.lineage << _LINEAGE_SHIFT) | self.step

    @classmethod
    def unpack(cls, packed: int) -> "PolicyVersion":
        return cls(int(packed) >> _LINEAGE_SHIFT, int(packed) & ((1 << _LINEAGE_SHIFT) - 1))

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """From `lineage.step`, as engines report it."""
        lineage, step = text.split(".")
        return cls(int(lineage), int(step))


class RoutedExperts(msgspec.Struct, array_like=True, frozen=True):
    """The experts that computed each of n tokens in each layer when they were sampled: [n, layers, top_k], in order.

    -1 where there is no record; without meaning for dense layers.
    """

    layers: int
    top_k: int
    ids: Array

    @classmethod
    def of(cls, experts: np.ndarray) -> "RoutedExperts":
        """Pack integers [n, layers, top_k], a byte each where that holds them."""
        _, layers, top_k = experts.shape
        small = experts.size and experts.min() >= 0 and experts.max() < 256
        return cls(layers, top_k, Array.of(experts.ravel(), "u1" if small else "i2"))

    def numpy(self) -> np.ndarray:
        """A read-only view of shape [n, layers, top_k]."""
        return self.ids.numpy().reshape(-1, self.layers, self.top_k)


class ImageSpan(msgspec.Struct, array_like=True, frozen=True):
    """The tokens of a sequence from `start` on that stand for an image, which `digest` names."""

    start: int
    length: int
    digest: str

    @property
    def stop(self) -> int:
        return self.start + self.length


def whole_images(images: list[ImageSpan], limit: int) -> tuple[int, list[ImageSpan]]:
    """Where to cut a sequence to at most `limit` tokens so that no image is split, and the images before the cut."""
    cut = min([limit, *(image.start for image in images if image.stop > limit)])
    return cut, [image for image in images if image.stop <= cut]


class Sample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A contiguous token sequence ready to train on; every stream has the length of `token_ids`.

    token_ids i4[n]; mask bool[n], true on sampled and trainable tokens; logprobs f4[n], of the sampler at its
    temperature, 0 where not sampled; versions i8[n], a packed `PolicyVersion` or `NOT_SAMPLED`; advantages f4[n].
    A component's weights are f4[n]; an absent `rl_weights` stands for ones on the mask, an absent other for zeros.
    `adapter` is the low-rank adapter that sampled it and trains on it, empty where there is one policy only. `images`
    are in the order of their tokens; what they show lies in the rollout.
    """

    sample_id: str
    source: str
    adapter: str = ""
    token_ids: Array
    mask: Array
    logprobs: Array
    versions: Array
    temperature: float = 1.0
    advantages: Array | None = None
    rl_weights: Array | None = None
    ce_weights: Array | None = None
    ref_kl_weights: Array | None = None
    ref_logprobs: Array | None = None
    routed_experts: RoutedExperts | None = None
    images: list[ImageSpan] = []


class Failure(msgspec.Struct, kw_only=True):
    """Why a rollout has no reward. `kind` is environment, inference or infrastructure."""

    kind: str
    type: str
    message: str


class Seat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One agent's part in an episode: its reward, its lengths and how many samples are its."""

    agent: str
    reward: float
    num_samples: int
    num_turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Rollout(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One episode as the orchestrator sees it: its samples, its reward, or its failure (never both).

    `seats` are those that the policy played, in the order of their samples. `images` holds the encoded images (PNG,
    JPEG) that the policy was shown, by digest. `phases` are the parts of its `seconds`, by name.
    """

    rollout_id: str
    source: str
    task_id: str
    samples: list[Sample] = []
    images: dict[str, bytes] = {}
    seats: list[Seat] = []
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    num_turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated: bool = False
    stop_condition: str = ""
    seconds: float = 0.0
    phases: dict[str, float] = {}
    failure: Failure | None = None


class WorkerHello(msgspec.Struct, kw_only=True, tag=True):
    """An environment worker is there; it says so every few seconds. `num_tasks` is None for an endless taskset.

    `first` marks the first hello of a process; `running` names the rollouts it is working on.
    """

    worker: str
    source: str
    capacity: int
    num_tasks: int | None
    first: bool = False
    running: list[str] = []


class Endpoint(msgspec.Struct, kw_only=True):
    """A model that answers at `base_url`. `key_variable` names the environment variable with its key where that is not
    the run's token."""

    base_url: str
    model: str
    key_variable: str | None = None


class RunRollout(msgspec.Struct, kw_only=True, tag=True):
    """Run task number `task_index` of the worker's source once, against the engine at `base_url`.

    `reference` scores its samples. `teacher` says that a frozen model answers there in the policy's place.
    `adapter` is put into the samples.
    """

    rollout_id: str
    task_index: int
    base_url: str
    model: str
    version: PolicyVersion
    sampling: dict[str, Any]
    evaluate: bool = False
    time_limit_s: float = 600.0
    key_variable: str | None = None
    teacher: bool = False
    reference: Endpoint | None = None
    adapter: str = ""


class CancelRollout(msgspec.Struct, kw_only=True, tag=True):
    """Stop a rollout; the worker answers with a RolloutDone whose failure has type `Cancelled`."""

    rollout_id: str


class RolloutDone(msgspec.Struct, kw_only=True, tag=True):
    """A finished or failed rollout. `messages` is the conversation as JSON, for the records; in the place of the URL of
    an image it has the digest. `tools` are those that its model could call, as in a chat request."""

    worker: str
    rollout: Rollout
    messages: str = "[]"
    tools: str = "[]"


class MicroBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Samples packed into one row of `sum(seq_lens)` tokens; streams as in `Sample`, all present but the weights.

    `seq_lens` are the lengths of the packed sequences in order; `sources` name the source of each, `adapters` the
    adapter, whose sequences lie together (empty where there is one policy only). `images` count from the first token.
    """

    token_ids: Array
    mask: Array
    logprobs: Array
    versions: Array
    advantages: Array
    temperatures: Array
    seq_lens: list[int]
    sources: list[str]
    adapters: list[str] = []
    rl_weights: Array | None = None
    ce_weights: Array | None = None
    ref_kl_weights: Array | None = None
    ref_logprobs: Array | None = None
    routed_experts: RoutedExperts | None = None
    images: list[ImageSpan] = []

    def position_ids(self) -> np.ndarray:
        """i8[n]: positions that restart at 0 with every packed sequence."""
        return np.concatenate([np.arange(n, dtype=np.int64) for n in self.seq_lens])


class RankBatch(msgspec.Struct, kw_only=True, tag=True):
    """Batch `step` as one data-parallel rank sees it. Every rank gets the same number of micro-batches.

    `sample_ids` are those of the whole batch, in order; `journal_offset` is where a resume after this step begins.
    `lr` is the peak learning rate from this step on, where it was changed while the run worked.
    `images` holds the encoded images of the micro-batches, by digest.
    An empty `micro_batches` with `last` tells the trainer to stop, one with `write_weights` to write the newest version
    whole, since engines have no other way to it, and to ask again.
    """

    step: int
    rank: int
    micro_batches: list[MicroBatch]
    sample_ids: list[str]
    journal_offset: int
    last: bool = False
    lr: float | None = None
    images: dict[str, bytes] = {}
    write_weights: bool = False


class StepReport(msgspec.Struct, kw_only=True):
    """What the trainer measured in one step; names as in docs/metrics.md."""

    step: int
    metrics: dict[str, float]


class BatchRequest(msgspec.Struct, kw_only=True, tag=True):
    """Rank `rank` of `world` data-parallel ranks asks for batch `step`; the request may be repeated at will.

    `checkpointed` is the newest complete checkpoint's step: batches up to it need not be kept any more. The rank has
    `written` the version before `step` whole, as it was told to.
    """

    rank: int
    world: int
    step: int
    checkpointed: int
    report: StepReport | None = None
    written: bool = False


Message = WorkerHello | RunRollout | CancelRollout | RolloutDone | BatchRequest | RankBatch
M = TypeVar("M", WorkerHello, RunRollout, CancelRollout, RolloutDone, BatchRequest, RankBatch)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> list[bytes]:
    """Two frames: the schema version, then the message."""
    return [b"%d" % SCHEMA_VERSION, _encoder.encode(message)]


def decode_as(frames: list[bytes], kind: type[M]) -> M:
    """The message of two frames, where only `kind` belongs.

    Raises:
        CorruptData: it is another message, or none.
        SchemaMismatch: the peer speaks another schema version.
    """
    message = decode(frames)
    if not isinstance(message, kind):
        raise CorruptData(f"got a {type(message).__name__} where a {kind.__name__} belongs")
    return message


def decode(frames: list[bytes]) -> Message:
    """The message of two frames.

    Raises:
        SchemaMismatch: the peer speaks another schema version.
        CorruptData: the frames hold no message of this schema.
    """
    if len(frames) != 2:
        raise CorruptData(f"a message has 2 frames, got {len(frames)}")
    if frames[0] != b"%d" % SCHEMA_VERSION:
        raise SchemaMismatch(
            f"a peer speaks message schema {frames[0][:20].decode(errors='replace')!r}, this process speaks "
            f"{SCHEMA_VERSION}: start every process of a run from one installation of prime_hpc"
        )
    try:
        return _decoder.decode(frames[1])
    except msgspec.MsgspecError as error:
        raise CorruptData(f"not a message of schema {SCHEMA_VERSION}: {error}") from error
