"""Advantages from the rewards of a group, and their way onto the tokens of a sample."""

from collections.abc import Hashable, Sequence

import msgspec
import numpy as np

from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Sample

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def centred(rewards: np.ndarray) -> np.ndarray:
    """f8[g]: `R - mean(R)`; exactly 0 where all rewards are equal, whatever the mean is rounded to."""
    if len(rewards) == 0 or (rewards == rewards[0]).all():
        return np.zeros(len(rewards))
    return rewards - rewards.mean()


def grpo(rewards: np.ndarray, std: bool = False) -> np.ndarray:
    """f8[g]: `R - mean(R)` (Dr. GRPO; Liu et al. 2025, arXiv 2503.20783); with `std` divided by the population standard
    deviation of the group (GRPO; Shao et al. 2024, arXiv 2402.03300, section 4.1.2)."""
    values = centred(rewards)
    return values / (values.std() + EPSILON) if std and len(values) else values


def max_rl(rewards: np.ndarray) -> np.ndarray:
    """f8[g]: `(R - mean(R)) / mean(R)`, all 0 where the mean is not positive (arXiv 2602.02710)."""
    mean = rewards.mean() if len(rewards) else 0.0
    return centred(rewards) / mean if mean > 0 else np.zeros(len(rewards))


def rloo(rewards: np.ndarray) -> np.ndarray:
    """f8[g]: reward minus the mean of the others, `g / (g - 1) * (R - mean(R))`; 0 for a group of one (Ahmadian et al.
    2024, arXiv 2402.14740)."""
    count = len(rewards)
    return centred(rewards) * (count / (count - 1)) if count > 1 else np.zeros(count)


def reinforce_pp(groups: Sequence[np.ndarray], baseline: str = "group") -> list[np.ndarray]:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): rewards less the batch's mean, or with a baseline less their
    group's, divided by the standard deviation of the result over the whole batch."""
    rewards = np.concatenate(groups) if groups else np.zeros(0)
    values = centred(rewards) if baseline == "batch" else np.concatenate([centred(g) for g in groups] or [rewards])
    scaled = values / (values.std() + EPSILON) if len(values) else values
    return np.split(scaled, np.cumsum([len(g) for g in groups])[:-1]) if groups else []


def rae(rewards: np.ndarray, agents: Sequence[str], baselines: dict[str, float], decay: float) -> np.ndarray:
    """f8[k]: `R - b` of the trajectory's own agent, one after another; then `b <- decay b + (1 - decay) R`.

    Role-conditioned advantages of self-play (Liu et al. 2025, arXiv 2506.24119). `baselines` start at 0 and are changed
    in place; a reward enters the baseline only after the comparison, so that the baseline does not depend on it.
    """
    values = np.zeros(len(rewards))
    for i, (reward, agent) in enumerate(zip(rewards.tolist(), agents, strict=True)):
        before = baselines.get(agent, 0.0)
        values[i] = reward - before
        baselines[agent] = decay * before + (1 - decay) * reward
    return values


def among_peers(rewards: np.ndarray, peers: Sequence[Hashable]) -> np.ndarray:
    """f8[k]: reward minus the mean over the trajectories with the same key in `peers`."""
    values = np.zeros(len(rewards))
    for key in dict.fromkeys(peers):
        same = [i for i, other in enumerate(peers) if other == key]
        values[same] = centred(rewards[same])
    return values


def with_advantage(sample: Sample, value: float | Sequence[float] | np.ndarray) -> Sample:
    """`sample` with `value` on its masked tokens and 0 elsewhere.

    `value` is a scalar or one number for each masked token, in order.

    Raises:
        ValueError: a list whose length is not the number of masked tokens.
    """
    mask = sample.mask.numpy()
    values = np.asarray(value, dtype=np.float32)
    if values.ndim and len(values) != mask.sum():
        raise ValueError(f"{len(values)} advantages do not align with the {mask.sum()} sampled tokens of "
                         f"{sample.sample_id}")  # fmt: skip
    stream = np.zeros(len(mask), dtype=np.float32)
    stream[mask] = values
    return msgspec.structs.replace(sample, advantages=Array.of(stream, "f4"))
