"""What was sampled and must not train: predicates over samples, rollouts and groups, and the streams without it."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from prime_hpc.config.algorithm import DifficultyFilter, Filters, GibberishFilter, RepetitionFilter
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Rollout, Sample


def unfit(rollout: Rollout, filters: Filters) -> str | None:
    """Why the sampled tokens of a rollout must not train, as a word for the metrics; None if they may."""
    if filters.truncated and rollout.truncated:
        return "truncated"
    if filters.repetition and any(repeats(sample, filters.repetition) for sample in rollout.samples):
        return "repetition"
    if filters.gibberish and any(is_gibberish(sample, filters.gibberish) for sample in rollout.samples):
        return "gibberish"
    return None


def repeats(sample: Sample, settings: RepetitionFilter) -> bool:
    """Whether `window` sampled tokens in a row were all more probable than `probability`: a text that repeats itself
    leaves no doubt about what comes next (MiniMax-M1, arXiv 2506.13585, stops such replies early)."""
    sure = sample.logprobs.numpy()[sample.mask.numpy()] > math.log(settings.probability)
    positions = np.arange(len(sure))
    last_doubt = np.maximum.accumulate(np.where(sure, -1, positions))
    return bool((positions - last_doubt).max(initial=0) >= settings.window)


def is_gibberish(sample: Sample, settings: GibberishFilter) -> bool:
    """Whether a sampled token is both rare (by its id) and was improbable: a slip of numerics or of high temperature,
    after which the text makes no sense."""
    mask = sample.mask.numpy()
    rare = sample.token_ids.numpy()[mask] >= settings.token_id
    return bool((rare & (sample.logprobs.numpy()[mask] < settings.logprob)).any())


def is_off_difficulty(rewards: Sequence[float], bounds: DifficultyFilter) -> bool:
    """Whether a group's mean reward says that its task is too hard or too easy. An empty group is neither."""
    if not rewards:
        return False
    mean = sum(rewards) / len(rewards)
    too_hard = bounds.min_reward is not None and mean <= bounds.min_reward
    return too_hard or (bounds.max_reward is not None and mean >= bounds.max_reward)


def without_sampled_tokens(sample: Sample) -> tuple[Sample, int]:
    """`sample` with an empty mask, and how many tokens left it."""
    mask = sample.mask.numpy()
    return msgspec.structs.replace(sample, mask=Array.of(np.zeros_like(mask), "bool")), int(mask.sum())


def without_zero_advantage(sample: Sample) -> tuple[Sample, int]:
    """`sample` with its zero-advantage tokens out of the policy-gradient component, so that they do not count in its
    normaliser, and how many there were. A sample without advantages stays as it is."""
    if sample.advantages is None:
        return sample, 0
    mask = sample.mask.numpy()
    weights = np.ones(len(mask), dtype=np.float32) if sample.rl_weights is None else sample.rl_weights.numpy().copy()
    zero = mask & (weights != 0) & (sample.advantages.numpy() == 0)
    if not zero.any():
        return sample, 0
    weights[zero] = 0
    return msgspec.structs.replace(sample, rl_weights=Array.of(weights, "f4")), int(zero.sum())


def trains(sample: Sample) -> bool:
    """Whether any token of the sample is a member of any loss component."""
    rl = sample.mask.numpy() & (True if sample.rl_weights is None else sample.rl_weights.numpy() != 0)
    others = [w for w in (sample.ce_weights, sample.ref_kl_weights) if w is not None]
    return bool(rl.any() or any(w.numpy().any() for w in others))
