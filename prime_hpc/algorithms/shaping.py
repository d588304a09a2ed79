"""Length penalties: rewards of a group as credit assignment sees them. What is recorded stays unshaped."""

from collections.abc import Sequence

import numpy as np

from prime_hpc.algorithms.trajectories import Trajectory
from prime_hpc.config.algorithm import LengthPenalty, LinearLengthPenalty, OverlongPenalty


def shaped_rewards(group: Sequence[Trajectory], penalty: LengthPenalty | None) -> np.ndarray:
    """f8[g]: rewards of the group's trajectories less their penalties."""
    rewards = np.array([t.reward for t in group], dtype=np.float64)
    match penalty:
        case LinearLengthPenalty():
            return linear(rewards, group, penalty)
        case OverlongPenalty():
            return rewards + overlong(np.array([t.completion_tokens for t in group]), penalty.limit, penalty.cache)
    return rewards


def linear(rewards: np.ndarray, group: Sequence[Trajectory], penalty: LinearLengthPenalty) -> np.ndarray:
    """f8[g]: `R - mean(R) * f`, where f adds up sampled tokens, other tokens and turns, each as a weighted share of the
    group's largest. Right and wrong answers pay alike, and tasks that are rarely solved hardly at all."""
    weighted = (
        (penalty.output_weight, [t.completion_tokens for t in group]),
        (penalty.input_weight, [t.prompt_tokens for t in group]),
        (penalty.turn_weight, [t.turns for t in group]),
    )
    share = sum(weight * np.array(counts) / max(1, *counts) for weight, counts in weighted) if len(group) else 0.0
    return rewards - (rewards.mean() if len(group) else 0.0) * share


def overlong(lengths: np.ndarray, limit: int, cache: int) -> np.ndarray:
    """f8[g]: 0 up to `limit - cache` tokens, then falling to -1 at `limit` (DAPO; Yu et al. 2025, arXiv 2503.14476,
    eq. 13)."""
    return np.clip((limit - cache - lengths) / cache, -1.0, 0.0)
