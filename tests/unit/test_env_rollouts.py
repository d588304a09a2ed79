"""Episodes built by hand, as verifiers would return them."""

import json
import math
import re
import zlib

import msgspec
import numpy as np
import pytest
import verifiers.v1 as vf

from prime_hpc.envs.failures import failure_of_exception
from prime_hpc.envs.images import ImageNotTrained
from prime_hpc.envs.rollouts import conversation, make_rollout, make_samples
from prime_hpc.envs.stamps import token_versions
from prime_hpc.transport.images import digest_of, to_data_uri
from prime_hpc.transport.messages import NOT_SAMPLED, ImageSpan, PolicyVersion, RunRollout
from prime_hpc.transport.stamps import Stamp

V0, V1 = PolicyVersion(0, 0).pack(), PolicyVersion(1, 7).pack()
REQUEST = RunRollout(rollout_id="r", task_index=3, base_url="", model="policy", version=PolicyVersion(0, 0),
                     sampling={})  # fmt: skip


def stamp(ids: list[int], *spans: tuple[str, int, int]) -> Stamp:
    crc = zlib.crc32(np.asarray(ids, dtype="<i4").tobytes())
    return Stamp(request_id="x", tokens=len(ids), crc=crc, spans=list(spans))


def said(parent: int | None, ids: list[int]) -> vf.MessageNode:
    message = {"role": "user", "content": "u"}
    return vf.MessageNode(parent=parent, message=message, token_ids=ids, mask=[False] * len(ids))


def replied(parent: int, scaffold: list[int], ids: list[int]) -> vf.MessageNode:
    mask = [False] * len(scaffold) + [True] * len(ids)
    return vf.MessageNode(parent=parent, message={"role": "assistant", "content": "a"}, token_ids=[*scaffold, *ids],
                          mask=mask, sampled=True, logprobs=[-0.5] * len(ids))  # fmt: skip


def make_trace(*nodes: vf.MessageNode, name: str = "agent", model: str = "policy", **fields) -> vf.Trace:
    config = vf.AgentConfig(model=model, runtime={"type": "subprocess"}, sampling={"temperature": 0.25})
    agent = vf.AgentInfo(config=config, name=name, trainable=fields.pop("trainable", True))
    fields.setdefault("rewards", {"good": vf.Reward(score=1.0)})
    return vf.Trace(task=vf.TraceTask(type="t", data=vf.TaskData(), key="k"), agent=agent, nodes=list(nodes), ok=True,
                    **fields)  # fmt: skip


def make_episode(*traces: vf.Trace, ok: bool = True, errors: tuple[vf.Error, ...] = ()) -> vf.Episode:
    task = vf.TraceTask(type="t", data=vf.TaskData(), key="k")
    return vf.Episode(task=task, traces=list(traces), ok=ok, errors=list(errors))


def rollout_of(episode: vf.Episode):
    return make_rollout(REQUEST, "s", episode, {t.id: [] for t in episode.traces}, 32, 1.5)


def test_versions_follow_spans_and_leave_gaps_unsampled() -> None:
    streams = token_versions([np.array([5, 6, 7])], [stamp([5, 6, 7], ("0.0", 0, 1), ("1.7", 1, 2))])
    assert [s.tolist() for s in streams] == [[V0, V1, NOT_SAMPLED]]


def test_equal_completions_take_their_stamps_in_order() -> None:
    first, second = stamp([5], ("0.0", 0, 1)), stamp([5], ("1.7", 0, 1))
    streams = token_versions([np.array([5]), np.array([5]), np.array([5])], [first, second])
    assert [s.tolist() for s in streams] == [[V0], [V1], [NOT_SAMPLED]]


def test_a_stamp_of_other_tokens_is_not_taken() -> None:
    assert token_versions([np.array([5, 6])], [stamp([6, 5], ("0.0", 0, 2))])[0].tolist() == [NOT_SAMPLED] * 2


def test_experts_of_a_branch_come_with_its_sample_up_to_the_limit() -> None:
    nodes = [said(None, [1, 2]), replied(0, [], [10, 11])]
    for i, node in enumerate(nodes):
        node.routed_experts = np.full((2, 3, 2), i, dtype=np.uint8)
    [sample], _ = make_samples(make_trace(*nodes), [stamp([10, 11], ("0.0", 0, 2))], "s", 3)
    assert sample.routed_experts.numpy()[:, 0].tolist() == [[0, 0], [0, 0], [1, 1]]
    nodes[1].routed_experts = None
    [sample], _ = make_samples(make_trace(*nodes), [stamp([10, 11], ("0.0", 0, 2))], "s", 3)
    assert sample.routed_experts is None


def test_samples_carry_the_adapter_that_was_asked_for() -> None:
    request = msgspec.structs.replace(REQUEST, model="games", adapter="games")
    episode = make_episode(make_trace(said(None, [1]), replied(0, [], [10]), model="games"))
    rollout = make_rollout(request, "s", episode, {t.id: [] for t in episode.traces}, 32, 1.5)
    assert [sample.adapter for sample in rollout.samples] == ["games"]


def test_a_reply_shared_by_branches_is_trained_once() -> None:
    trace = make_trace(said(None, [1]), replied(0, [2], [10, 11]), said(1, [3]), replied(2, [], [12]),
                       said(1, [4]), replied(4, [], [13]))  # fmt: skip
    stamps = [stamp([10, 11], ("0.0", 0, 2)), stamp([12], ("1.7", 0, 1)), stamp([13], ("1.7", 0, 1))]
    samples, cut = make_samples(trace, stamps, "s", 32)
    assert not cut
    assert [s.token_ids.numpy().tolist() for s in samples] == [[1, 2, 10, 11, 3, 12], [1, 2, 10, 11, 4, 13]]
    assert [s.mask.numpy().tolist() for s in samples] == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1]]
    for sample in samples:
        assert sample.versions.numpy().tolist() == [NOT_SAMPLED, NOT_SAMPLED, V0, V0, NOT_SAMPLED, V1]
        assert sample.logprobs.numpy().tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
        assert sample.temperature == 0.25 and sample.source == "s"


def test_a_long_sequence_is_cut_and_its_rollout_truncated() -> None:
    trace = make_trace(said(None, [1, 2]), replied(0, [], [3, 4, 5]))
    stamps = {trace.id: [stamp([3, 4, 5], ("0.0", 0, 3))]}
    rollout = make_rollout(REQUEST, "s", make_episode(trace), stamps, 4, 1.0)
    [sample] = rollout.samples
    assert sample.token_ids.numpy().tolist() == [1, 2, 3, 4] and sample.versions.numpy().tolist()[2:] == [V0, V0]
    assert sample.sample_id == "r/0" and rollout.truncated


def test_a_sequence_cut_before_its_first_reply_gives_no_sample() -> None:
    samples, _ = make_samples(make_trace(said(None, [1, 2, 3]), replied(0, [], [4])), [], "s", 3)
    assert samples == []


def test_rewards_are_weighted_sums_and_recorded_by_name() -> None:
    rewards = {"good": vf.Reward(score=1.0), "short": vf.Reward(score=0.5, weight=0.2)}
    trace = make_trace(said(None, [1]), replied(0, [], [2]), rewards=rewards, metrics={"length": 3.0, "unscored": None})
    rollout = rollout_of(make_episode(trace))
    assert rollout.reward == 1.1 and rollout.rewards == {"good": 1.0, "short": 0.5}
    assert rollout.metrics == {"length": 3.0} and rollout.task_id == "k" and rollout.seconds == 1.5


def test_only_seats_of_the_policy_count() -> None:
    solver = [make_trace(said(None, [1]), replied(0, [], [2]), name="solver", rewards={"r": vf.Reward(score=s)})
              for s in (0.0, 1.0)]  # fmt: skip
    judge = make_trace(said(None, [1]), replied(0, [], [9]), name="judge", rewards={}, trainable=False)
    frozen = make_trace(said(None, [1]), replied(0, [], [9]), name="rival", model="rival", rewards={})
    rollout = rollout_of(make_episode(*solver, judge, frozen))
    assert rollout.reward == 0.5 and rollout.num_turns == 2
    assert [s.sample_id for s in rollout.samples] == ["r/0", "r/1"]
    assert [(s.agent, s.reward, s.num_samples, s.num_turns) for s in rollout.seats] == [
        ("solver", 0.0, 1, 1),
        ("solver", 1.0, 1, 1),
    ]


def test_one_agent_alone_has_a_seat_by_its_name() -> None:
    proposal = make_trace(said(None, [1]), replied(0, [], [2]), name="proposer")
    [seat] = rollout_of(make_episode(proposal)).seats
    assert (seat.agent, seat.reward, seat.num_samples) == ("proposer", proposal.reward, 1)


def answered(parent: int, ids: list[int], body: list[bool]) -> vf.MessageNode:
    message = {"role": "tool", "tool_call_id": "x", "content": "c"}
    return vf.MessageNode(parent=parent, message=message, token_ids=ids, mask=[False] * len(ids), is_content=body)


def test_what_a_tool_answers_is_echoed_in_the_first_branch_that_holds_it() -> None:
    trace = make_trace(said(None, [1]), replied(0, [], [2]), answered(1, [3, 4], [False, True]), replied(2, [], [5]),
                       said(2, [6]), replied(4, [], [7]))  # fmt: skip
    stamps = [stamp([token], ("0.0", 0, 1)) for token in (2, 5, 7)]
    first, second = make_samples(trace, stamps, "s", 32, {"tool": 0.5})[0]
    assert first.token_ids.numpy().tolist() == [1, 2, 3, 4, 5]
    assert first.ce_weights.numpy().tolist() == [0, 0, 0, 0.5, 0]
    assert second.token_ids.numpy().tolist() == [1, 2, 3, 4, 6, 7] and second.ce_weights is None
    [cut, _] = make_samples(trace, stamps, "s", 3, {"tool": 0.5, "user": 1.0})[0] + [None]
    assert cut.ce_weights.numpy().tolist() == [0, 0, 0]
    assert all(sample.ce_weights is None for sample in make_samples(trace, stamps, "s", 32)[0])


@pytest.mark.parametrize(
    "rewards", [{}, {"good": None}, {"good": vf.Reward(score=math.nan)}, {"good": vf.Reward(score=math.inf)}]
)
def test_a_reward_that_is_no_finite_number_is_a_failure(rewards: dict) -> None:
    rollout = rollout_of(make_episode(make_trace(said(None, [1]), replied(0, [], [2]), rewards=rewards)))
    assert rollout.reward is None and rollout.samples == []
    assert (rollout.failure.kind, rollout.failure.type) == ("environment", "InvalidReward")


@pytest.mark.parametrize(
    "error, kind",
    [
        ("ProviderError", "inference"),
        ("InterceptionError", "inference"),
        ("TunnelError", "inference"),
        ("SandboxError", "infrastructure"),
        ("ToolsetError", "infrastructure"),
        ("TaskError", "environment"),
        ("HarnessError", "environment"),
        ("TimeoutError", "environment"),
    ],
)
def test_errors_of_a_trace_are_kept_apart(error: str, kind: str) -> None:
    trace = make_trace(said(None, [1]), errors=[vf.Error(type=error, message="why")])
    trace.ok = False
    consequence = vf.Error(type="EnvError", message="run() failed")
    failure = rollout_of(make_episode(trace, ok=False, errors=(consequence,))).failure
    assert (failure.kind, failure.type, failure.message) == (kind, error, "why")


def test_an_error_of_the_environment_itself_counts_where_every_trace_is_fine() -> None:
    episode = make_episode(make_trace(said(None, [1])), ok=False, errors=(vf.Error(type="EnvError", message="why"),))
    assert (rollout_of(episode).failure.kind, rollout_of(episode).failure.type) == ("environment", "EnvError")


def test_an_expired_stage_is_a_timeout_though_it_was_scored() -> None:
    trace = make_trace(said(None, [1]), replied(0, [], [2]), is_timeout=True, stop_condition="agent_timeout")
    failure = rollout_of(make_episode(trace)).failure
    assert (failure.kind, failure.type, failure.message) == ("environment", "Timeout", "agent: agent_timeout")


def test_a_model_call_that_failed_last_is_no_behaviour_of_the_policy() -> None:
    call = vf.ModelCall(error=vf.Error(type="ProviderError", message="gone", status_code=503))
    failure = rollout_of(make_episode(make_trace(said(None, [1]), replied(0, [], [2]), calls=[call]))).failure
    assert (failure.kind, failure.type) == ("inference", "ProviderError")


def test_a_full_context_ends_a_rollout_that_is_scored_as_truncated() -> None:
    call = vf.ModelCall(error=vf.Error(type="ProviderError", message="too long", status_code=400))
    rollout = rollout_of(make_episode(make_trace(said(None, [1]), replied(0, [], [2]), calls=[call])))
    assert rollout.failure is None and rollout.reward == 1.0 and rollout.truncated


PNG, OTHER = b"one image", b"another"
IMAGE = 90
"""The token that stands for an image."""


def showed(parent: int | None, ids: list[int], *images: bytes | str) -> vf.MessageNode:
    urls = [image if isinstance(image, str) else to_data_uri(image) for image in images]
    content = [{"type": "text", "text": "u"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    message = {"role": "user", "content": content}
    return vf.MessageNode(parent=parent, message=message, token_ids=ids, mask=[False] * len(ids))


def seeing(*nodes: vf.MessageNode) -> vf.Trace:
    return make_trace(*nodes, mm_token_type_id_map={IMAGE: 1})


def test_every_image_is_kept_once_and_its_tokens_are_known() -> None:
    trace = seeing(showed(None, [1, 90, 90, 91, 90], PNG, OTHER), replied(0, [2], [10, 90]),
                   showed(1, [3, 90, 90], PNG), replied(2, [], [12]), said(1, [4]), replied(4, [], [13]))  # fmt: skip
    rollout = rollout_of(make_episode(trace))
    one, other = digest_of(PNG), digest_of(OTHER)
    assert rollout.images == {one: PNG, other: OTHER}
    first, second = rollout.samples
    assert first.images == [ImageSpan(1, 2, one), ImageSpan(4, 1, other), ImageSpan(9, 2, one)]
    assert second.images == [ImageSpan(1, 2, one), ImageSpan(4, 1, other)]


@pytest.mark.parametrize(("seq_len", "length", "images"), [(32, 9, 2), (9, 9, 2), (8, 8, 2), (7, 6, 1), (6, 6, 1)])
def test_a_cut_splits_no_image_and_drops_those_behind_it(seq_len: int, length: int, images: int) -> None:
    trace = seeing(showed(None, [1, 90, 90], PNG), replied(0, [2], [10, 11]), showed(1, [90, 90], OTHER),
                   replied(2, [], [3]))  # fmt: skip
    rollout = make_rollout(REQUEST, "s", make_episode(trace), {trace.id: []}, seq_len, 1.0)
    [sample] = rollout.samples
    streams = (sample.token_ids, sample.mask, sample.logprobs, sample.versions)
    assert [len(stream) for stream in streams] == [length] * 4
    assert len(sample.images) == images and rollout.truncated == (length < 9)


def test_the_record_of_a_conversation_is_the_policy_s() -> None:
    opponent = make_trace(said(None, [1]), said(0, [2]), name="opponent", trainable=False)
    mine = make_trace(said(None, [1]), replied(0, [], [2]), name="mine")
    mine.nodes[0].tools = [vf.Tool(name="f", description="d", parameters={"type": "object"})]
    recorded = {name: json.loads(text) for name, text in conversation(make_episode(opponent, mine), "policy").items()}
    assert [m["role"] for m in recorded["messages"]] == ["user", "assistant"]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert recorded["tools"] == [{"type": "function", "function": function}]
    others = json.loads(conversation(make_episode(opponent), "policy")["messages"])
    assert [m["role"] for m in others] == ["user", "user"], "where the policy has no trace"


def test_the_record_of_a_conversation_names_its_images() -> None:
    episode = make_episode(seeing(showed(None, [1, 90], PNG, "https://x/y.png")))
    [message] = json.loads(conversation(episode, "policy")["messages"])
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    assert urls == [digest_of(PNG), "https://x/y.png"]


@pytest.mark.parametrize(
    ("ids", "images", "told"),
    [
        ([1, 90, 2], (PNG, OTHER), "2 images has 1 runs of placeholders"),
        ([1, 90, 2, 90], (PNG,), "1 images has 2 runs"),
        ([1, 2], ("https://x/y.png",), "'https://x/y.png' is no image"),
        ([1, 2], ("data:image/png;base64,?",), "holds no base64"),
    ],
)
def test_images_that_cannot_be_kept_with_their_tokens_do_not_train(ids: list[int], images: tuple, told: str) -> None:
    trace = seeing(showed(None, ids, *images), replied(0, [], [10, 11]))
    with pytest.raises(ImageNotTrained, match=re.escape(told)) as raised:
        rollout_of(make_episode(trace))
    assert failure_of_exception(raised.value).kind == "environment"
    asked = msgspec.structs.replace(REQUEST, evaluate=True)
    rollout = make_rollout(asked, "s", make_episode(trace), {trace.id: []}, 32, 1.5)
    assert rollout.failure is None and rollout.reward == 1.0 and rollout.images == {}


def test_phases_of_an_episode_are_those_that_verifiers_measured() -> None:
    trace = make_trace(said(None, [1]), replied(0, [], [2]))
    for name, start, end in (("boot", 1, 2), ("setup", 2, 4), ("agent", 4, 12), ("scoring", 12, 15)):
        getattr(trace.timing, name).start = start
        getattr(trace.timing, name).end = end
    trace.timing.agent.model.duration, trace.timing.agent.harness.duration = 5.0, 3.0
    assert rollout_of(make_episode(trace)).phases == {
        "boot": 1.0, "setup": 2.0, "model": 5.0, "harness": 3.0, "finalize": 0.0, "scoring": 3.0,
    }  # fmt: skip
