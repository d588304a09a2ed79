"""Credit assignment: from the rewards of a group to a per-token advantage stream."""

from collections.abc import Sequence

import msgspec
import numpy as np

from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Sample


def advantages(rewards: np.ndarray, name: str) -> np.ndarray:
    """Advantage f8[g] of each rollout in a group of g rewards.

    grpo: `R - mean(R)`, without division by the standard deviation (Liu et al. 2025, arXiv 2503.20783).
    max_rl: `(R - mean(R)) / mean(R)`, all 0 where the mean is not positive (arXiv 2602.02710).

    Raises:
        ValueError: unknown name, or a reward that is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}: failed rollouts have no place in a group")
    if len(rewards) == 0:
        return rewards
    mean = rewards.mean()
    if name == "grpo":
        return rewards - mean
    if name == "max_rl":
        return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)
    raise ValueError(f"unknown algorithm {name!r}: expected grpo or max_rl")


def with_advantage(sample: Sample, value: float | Sequence[float]) -> Sample:
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
