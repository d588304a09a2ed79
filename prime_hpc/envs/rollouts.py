"""From a verifiers episode to our rollout: exact tokens, masks, log-probabilities, versions, reward."""

import json
import math
from collections.abc import Callable, Mapping
from statistics import fmean

import numpy as np
import verifiers.v1 as vf

from prime_hpc.algorithms.routing import Span, echo_weights
from prime_hpc.envs.failures import failure_of_episode, last_call_error
from prime_hpc.envs.images import Gallery, name_images
from prime_hpc.envs.stamps import token_versions
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import (
    NOT_SAMPLED,
    Failure,
    Rollout,
    RoutedExperts,
    RunRollout,
    Sample,
    Seat,
    whole_images,
)
from prime_hpc.transport.stamps import Stamp


def policy_traces(episode: vf.Episode, model: str) -> list[vf.Trace]:
    """The traces that the policy played, not a judge, a frozen model or a fixed opponent."""
    return [t for t in episode.traces if t.agent.trainable and t.agent.config.model == model]


def make_rollout(
    request: RunRollout,
    source: str,
    episode: vf.Episode,
    stamps: dict[str, list[Stamp]],
    seq_len: int,
    seconds: float,
    echo: Mapping[str, float] | None = None,
) -> Rollout:
    """The rollout of an episode. `stamps` are those of each trace, by trace id; `seconds` is how long it took; `echo`
    gives cross-entropy weights of what the environment said, by role.

    Each policy trace has a seat with its own reward; the reward of the rollout, which is one number, is their mean.

    Raises:
        ImageNotTrained: the policy was shown an image that cannot be kept with its tokens; an evaluation keeps none.
    """
    traces = policy_traces(episode, request.model)
    rollout = Rollout(
        rollout_id=request.rollout_id,
        source=source,
        task_id=episode.task.key or str(request.task_index),
        num_turns=sum(t.num_turns for t in traces),
        prompt_tokens=sum(t.num_input_tokens for t in traces),
        completion_tokens=sum(t.num_output_tokens for t in traces),
        truncated=any(t.is_truncated or last_call_error(t) for t in traces),
        stop_condition=next((t.stop_condition for t in traces if t.stop_condition), ""),
        seconds=seconds,
    )
    rollout.failure = failure_of_episode(episode) or _invalid_reward(traces)
    if rollout.failure is None:
        _add_scored(rollout, request, traces, stamps, seq_len, echo)
    return rollout


def _add_scored(
    rollout: Rollout,
    request: RunRollout,
    traces: list[vf.Trace],
    stamps: dict[str, list[Stamp]],
    seq_len: int,
    echo: Mapping[str, float] | None,
) -> None:
    """What only an episode that ended well has: rewards, metrics, samples and seats."""
    gallery = None if request.evaluate else Gallery(traces)
    rollout.images = gallery.encoded if gallery else {}
    rollout.reward = fmean(t.reward for t in traces)
    rollout.rewards = _means(traces, lambda t: {name: r.score for name, r in t.rewards.items() if r})
    rollout.phases = _phases(traces)
    rollout.metrics = _means(traces, lambda t: {name: m for name, m in t.metrics.items() if m is not None})
    for trace in traces:
        samples, cut = make_samples(trace, stamps[trace.id], rollout.source, seq_len, echo, gallery)
        rollout.samples += samples
        rollout.truncated |= cut
        rollout.seats.append(_seat(trace, len(samples)))
    for index, sample in enumerate(rollout.samples):
        sample.sample_id = f"{request.rollout_id}/{index}"
        sample.adapter = request.adapter


def make_samples(
    trace: vf.Trace,
    stamps: list[Stamp],
    source: str,
    seq_len: int,
    echo: Mapping[str, float] | None = None,
    gallery: Gallery | None = None,
) -> tuple[list[Sample], bool]:
    """One sample for every branch with a token to train, without ids yet, and whether one was cut to `seq_len`.

    A message that several branches share is trained in the first; to the others it is context. `gallery` holds the
    images of the trace; a cut splits none of them.

    Raises:
        ImageNotTrained: placeholders and images of a message do not fit.
    """
    sampled = [node for node in trace.nodes if node.sampled]
    completions = [np.asarray(node.token_ids, dtype=np.int32)[np.asarray(node.mask, dtype=bool)] for node in sampled]
    versions = {id(n): v for n, v in zip(sampled, token_versions(completions, stamps), strict=True)}
    trained: set[int] = set()
    samples, cut = [], False
    for branch in (b for b in trace.branches if b.trainable):
        length, images = whole_images(gallery.spans(branch) if gallery else [], seq_len)
        sample = _sample(branch, versions, trained, source, length, _temperature(trace))
        sample.images = images
        if echo and (weights := echo_weights([_span(node, trained) for node in branch.nodes], echo)) is not None:
            sample.ce_weights = Array.of(weights[:length], "f4")
        trained.update(id(node) for node in branch.nodes)
        if sample.mask.numpy().any():
            samples.append(sample)
            cut |= len(branch.token_ids) > length
    return samples, cut


def conversation(episode: vf.Episode, model: str) -> dict[str, str]:
    """The messages of the final branch of the policy's first trace, without the pixels of images, and its tools, as
    JSON; of the first trace where none is the policy's."""
    trace = next(iter([*policy_traces(episode, model), *episode.traces]), None)
    branches = trace.branches if trace else []
    messages, tools = (branches[-1].messages, branches[-1].tools) if branches else ([], [])
    return {"messages": json.dumps(name_images([m.model_dump(mode="json", exclude_none=True) for m in messages])),
            "tools": json.dumps([_function(tool) for tool in tools])}  # fmt: skip


def _function(tool: vf.Tool) -> dict:
    """A tool as a chat request has it."""
    return {"type": "function", "function": tool.model_dump(mode="json", include={"name", "description", "parameters"})}


def _span(node: vf.MessageNode, trained: set[int]) -> Span:
    """A message as echo sees it; one that another branch has trained is nobody's."""
    body = node.is_content if len(node.is_content) == len(node.token_ids) else None
    return Span("" if id(node) in trained else node.message.role, len(node.token_ids), node.sampled, body)


def _seat(trace: vf.Trace, num_samples: int) -> Seat:
    return Seat(
        agent=trace.agent.name,
        reward=trace.reward,
        num_samples=num_samples,
        num_turns=trace.num_turns,
        prompt_tokens=trace.num_input_tokens,
        completion_tokens=trace.num_output_tokens,
    )


def _sample(
    branch: vf.Branch, versions: dict[int, np.ndarray], trained: set[int], source: str, length: int, temperature: float
) -> Sample:
    sampled = np.asarray(branch.sampled_mask, dtype=bool)
    stream = np.full(len(sampled), NOT_SAMPLED, dtype=np.int64)
    if sampled.any():
        stream[sampled] = np.concatenate([versions[id(node)] for node in branch.nodes if node.sampled])
    experts = branch.routed_experts
    mask = np.concatenate([np.asarray(node.mask, dtype=bool) & (id(node) not in trained) for node in branch.nodes])
    return Sample(
        sample_id="",
        source=source,
        token_ids=Array.of(branch.token_ids[:length], "i4"),
        mask=Array.of(mask[:length], "bool"),
        logprobs=Array.of(branch.logprobs[:length], "f4"),
        versions=Array.of(stream[:length], "i8"),
        temperature=temperature,
        routed_experts=None if experts is None else RoutedExperts.of(experts[:length]),
    )


def _temperature(trace: vf.Trace) -> float:
    """The temperature of the trace's seat, which may differ from the source's; engines take 1 where none is given."""
    sampling = trace.agent.config.sampling
    return 1.0 if sampling is None or sampling.temperature is None else sampling.temperature


def _invalid_reward(traces: list[vf.Trace]) -> Failure | None:
    """A policy trace must have a reward, and every number of it must be finite."""
    for trace in traces:
        given = list(trace.rewards.values())
        if not given or None in given or not all(math.isfinite(r.value) for r in given):
            message = f"{trace.agent.name} has the rewards {_written(trace)}: every one must be a finite number"
            return Failure(kind="environment", type="InvalidReward", message=message)
    if not traces:
        message = "no trace of the policy: every seat is untrainable or plays another model"
        return Failure(kind="environment", type="InvalidReward", message=message)
    return None


def _phases(traces: list[vf.Trace]) -> dict[str, float]:
    """Mean seconds of a trace by what it did, as verifiers measures them; `model` is the time that replies took."""
    spent = [{
        "boot": t.timing.boot.duration,
        "setup": t.timing.setup.duration,
        "model": t.timing.agent.model.duration,
        "harness": t.timing.agent.harness.duration,
        "finalize": t.timing.finalize.duration,
        "scoring": t.timing.scoring.duration,
    } for t in traces]  # fmt: skip
    return {phase: fmean(each[phase] for each in spent) for phase in spent[0]}


def _written(trace: vf.Trace) -> dict[str, float | None]:
    return {name: reward and reward.value for name, reward in trace.rewards.items()}


def _means(traces: list[vf.Trace], numbers: Callable[[vf.Trace], dict[str, float]]) -> dict[str, float]:
    """Means over traces by name; where several seats play, names begin with the seat."""
    seats = len({t.agent.name for t in traces}) > 1
    values: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in numbers(trace).items():
            values.setdefault(f"{trace.agent.name}/{name}" if seats else name, []).append(value)
    return {name: fmean(given) for name, given in values.items()}
