"""Numbers of a step, of an evaluation and of the whole run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from prime_hpc.algorithms.estimators import estimates
from prime_hpc.observe.evaluation import newest_evaluation
from prime_hpc.orchestrator.batches import Batch
from prime_hpc.orchestrator.groups import Group
from prime_hpc.transport.messages import Rollout, RolloutDone

Metrics = dict[str, float]
REPLY_CHARS = 160
"""Of a reply that is quoted."""


def batch_metrics(batch: Batch) -> Metrics:
    """Rewards, lengths, staleness, drops and failures of one batch; names as in docs/metrics.md."""
    rollouts = [done.rollout for done in batch.rollouts]
    metrics = {
        "batch/rollouts": len(rollouts),
        "batch/samples": len(batch.samples),
        "batch/groups": len(batch.groups),
        "batch/informative": sum(group.informative for group in batch.groups),
        "batch/errors": sum(r.failure is not None for r in rollouts),
        "staleness/mean": _mean(batch.staleness) if len(batch.staleness) else 0.0,
        "staleness/p90": _quantile(batch.staleness, 0.9) if len(batch.staleness) else 0.0,
        "staleness/max": float(batch.staleness.max(initial=0)),
    }
    metrics.update({f"train/{source}/staleness": _mean(ages) for source, ages in batch.ages.items() if len(ages)})
    metrics.update({f"dropped/{reason}": float(count) for reason, count in sorted(batch.dropped.items())})
    metrics.update({f"dropped/{reason}/length": _mean(lengths) for reason, lengths in batch.dropped.lengths.items()})
    metrics.update({f"errors/{name}": float(n) for name, n in _failures(rollouts).items()})
    for source in ("all", *sorted({r.source for r in rollouts})):
        metrics.update(_scores(f"train/{source}", [r for r in batch.scored if source in ("all", r.source)]))
        metrics.update(_solved(f"train/{source}", [g for g in batch.groups if source in ("all", g.source)]))
    return metrics


def describe_outcome(groups: Sequence[Group]) -> str:
    """`in the last, exact is 0 and a reply 'abc'`: the rewards of groups by name and what the model said, in a line."""
    ended = [done for group in groups for done in group.done]
    scored = [done for done in ended if done.rollout.failure is None]
    if not scored:
        return f"in the last, all {len(ended)} rollouts failed"
    values: dict[str, list[float]] = {}
    for done in scored:
        for name, value in (done.rollout.rewards or {"the reward": done.rollout.reward or 0.0}).items():
            values.setdefault(name, []).append(value)
    rewards = ", ".join(f"{name} is {_range(found)}" for name, found in sorted(values.items()))
    return f"in the last, {rewards} and a reply {_reply(scored[-1])!r}"


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _reply(done: RolloutDone) -> str:
    """The last words of the model, shortened."""
    messages = msgspec.json.decode(done.messages)
    said = next((m.get("content") for m in reversed(messages) if m.get("role") == "assistant"), "")
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return text if len(text) <= REPLY_CHARS else f"{text[:REPLY_CHARS]}..."


def losses(given_up: Mapping[str, list[float]]) -> Metrics:
    """Rollouts that were given up, by reason, and the mean time since their groups began."""
    counts = {f"cancelled/{reason}": float(len(seconds)) for reason, seconds in given_up.items()}
    return counts | {f"cancelled/{reason}/seconds": _mean(seconds) for reason, seconds in given_up.items()}


def eval_metrics(source: str, rollouts: list[Rollout]) -> Metrics:
    """Mean reward and metrics of an evaluation, and avg@k, pass@k and pass^k where tasks have several rollouts."""
    scored = [r for r in rollouts if r.failure is None]
    tasks: dict[str, list[float]] = {}
    for rollout in scored:
        tasks.setdefault(rollout.task_id, []).append(rollout.reward)
    found = estimates(tasks.values()) if len(tasks) < len(scored) else {}
    return {
        **_scores(f"eval/{source}", scored),
        f"eval/{source}/errors": float(len(rollouts) - len(scored)),
        **{f"eval/{source}/{name}": value for name, value in found.items()},
    }


def summarise(rows: dict[int, dict[str, Any]], wall_s: float, idle: Metrics) -> dict[str, Any]:
    """The run's summary from metrics by step, the newest evaluation among them; `mismatch_abs_mean` is weighted by
    tokens, null where none compared."""
    rewards = [row["train/all/reward"] for _, row in sorted(rows.items()) if row.get("train/all/reward") is not None]
    tokens = np.array([row.get("mismatch/tokens") or 0.0 for row in rows.values()])
    means = np.array([row.get("mismatch/abs_mean") or 0.0 for row in rows.values()])
    compared = float(tokens.sum())
    return {
        "steps": max(rows, default=0),
        "reward_first5": float(np.mean(rewards[:5])) if rewards else None,
        "reward_last5": float(np.mean(rewards[-5:])) if rewards else None,
        "mismatch_abs_mean": float((tokens * means).sum() / compared) if compared else None,
        "mismatch_tokens": int(compared),
        "wall_s": round(wall_s, 2),
        **idle,
        **newest_evaluation(rows),
    }


def _scores(prefix: str, scored: list[Rollout]) -> Metrics:
    if not scored:
        return {}
    stops = Counter(r.stop_condition for r in scored if r.stop_condition)
    return {
        f"{prefix}/seconds": _mean([r.seconds for r in scored]),
        f"{prefix}/truncated": _mean([r.truncated for r in scored]),
        **_spread(f"{prefix}/reward", [r.reward for r in scored]),
        **_spread(f"{prefix}/completion_tokens", [r.completion_tokens for r in scored]),
        **_spread(f"{prefix}/prompt_tokens", [r.prompt_tokens for r in scored]),
        **_spread(f"{prefix}/turns", [r.num_turns for r in scored]),
        **{f"{prefix}/stop/{condition}": count / len(scored) for condition, count in sorted(stops.items())},
        **_means(f"{prefix}/seconds", [r.phases for r in scored]),
        **_means(f"{prefix}/rewards", [r.rewards for r in scored]),
        **_means(prefix, [r.metrics for r in scored]),
        **{f"{prefix}/{agent}/reward": _mean(rewards) for agent, rewards in _seats(scored).items()},
    }


def _solved(prefix: str, groups: list[Group]) -> Metrics:
    """Shares of the groups whose rewards are all 1 or more, all 0 or less, and anything else."""
    rewards = [[r.reward for r in group.scored] for group in groups if group.scored]
    if not rewards:
        return {}
    found = ["all" if min(each) >= 1 else "none" if max(each) <= 0 else "some" for each in rewards]
    return {f"{prefix}/solved_{name}": found.count(name) / len(found) for name in ("all", "some", "none")}


def _spread(name: str, values: list[Any]) -> Metrics:
    """The mean under `name`, and below it how far values lie apart."""
    return {name: _mean(values), f"{name}/p10": _quantile(values, 0.1), f"{name}/p90": _quantile(values, 0.9),
            f"{name}/max": float(max(values))}  # fmt: skip


def _means(prefix: str, named: list[dict[str, float]]) -> Metrics:
    """Mean of each name over those that have it."""
    names = sorted({name for each in named for name in each})
    return {f"{prefix}/{name}": _mean([each[name] for each in named if name in each]) for name in names}


def _seats(scored: list[Rollout]) -> dict[str, list[float]]:
    """Rewards of the agents, where there are several."""
    rewards: dict[str, list[float]] = {}
    for seat in (seat for r in scored for seat in r.seats):
        rewards.setdefault(seat.agent, []).append(seat.reward)
    return rewards if len(rewards) > 1 else {}


def _failures(rollouts: list[Rollout]) -> Counter:
    """Failures by kind, and by kind and type."""
    failures = [r.failure for r in rollouts if r.failure]
    return Counter([f.kind for f in failures] + [f"{f.kind}/{f.type}" for f in failures])


def _mean(values: Sequence[Any] | np.ndarray) -> float:
    return float(np.mean(values))


def _quantile(values: Sequence[Any] | np.ndarray, share: float) -> float:
    return float(np.quantile(values, share))
