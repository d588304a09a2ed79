"""What must not train: rollouts that repeat, babble or were cut, tasks off difficulty, tokens without advantage."""

import math

import pytest

from prime_hpc.algorithms.filters import (
    is_gibberish,
    is_off_difficulty,
    repeats,
    trains,
    unfit,
    without_sampled_tokens,
    without_zero_advantage,
)
from prime_hpc.config.algorithm import DifficultyFilter, Filters, GibberishFilter, RepetitionFilter
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Rollout, Sample

SURE, UNSURE = math.log(0.999), math.log(0.9)


def sample(logprobs: list[float], mask: list[int] | None = None, ids: list[int] | None = None, **streams) -> Sample:
    n = len(logprobs)
    return Sample(sample_id="s", source="a", token_ids=Array.of(ids or range(n), "i4"),
                  mask=Array.of(mask or [1] * n, "bool"), logprobs=Array.of(logprobs, "f4"),
                  versions=Array.of([0] * n, "i8"),
                  **{name: Array.of(values, "f4") for name, values in streams.items()})  # fmt: skip


@pytest.mark.parametrize(
    ("logprobs", "mask", "expected"),
    [
        ([SURE] * 3, None, True),
        ([SURE, SURE, UNSURE, SURE, SURE], None, False),
        ([UNSURE, SURE, SURE, SURE], None, True),
        ([SURE, SURE, -9.0, SURE], [1, 1, 0, 1], True),
        ([SURE, SURE, SURE], [0, 1, 1], False),
        ([], [], False),
    ],
)
def test_a_run_of_certain_tokens_is_a_repetition(logprobs, mask, expected):
    assert repeats(sample(logprobs, mask), RepetitionFilter(window=3, probability=0.99)) is expected


@pytest.mark.parametrize(
    ("ids", "logprobs", "mask", "expected"),
    [
        ([5, 200], [-1.0, -20.0], [1, 1], True),
        ([5, 200], [-20.0, -1.0], [1, 1], False),
        ([5, 99], [-1.0, -20.0], [1, 1], False),
        ([5, 100], [-1.0, -14.5], [1, 1], True),
        ([5, 200], [-1.0, -20.0], [1, 0], False),
    ],
)
def test_gibberish_is_rare_and_improbable(ids, logprobs, mask, expected):
    assert is_gibberish(sample(logprobs, mask, ids), GibberishFilter(token_id=100, logprob=-14.0)) is expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0, 0], True), ([0, 1], False), ([1, 1], True), ([0.1, 0.1], True), ([], False), ([0, 0.4], False)],
)
def test_difficulty_is_judged_by_the_mean_reward(rewards, expected):
    assert is_off_difficulty(rewards, DifficultyFilter(min_reward=0.1, max_reward=1.0)) is expected
    assert not is_off_difficulty(rewards, DifficultyFilter())


def rollout(*samples: Sample, truncated: bool = False) -> Rollout:
    return Rollout(rollout_id="r", source="a", task_id="t", reward=1.0, samples=list(samples), truncated=truncated)


def test_filters_are_off_until_chosen():
    bad = rollout(sample([SURE] * 4000), sample([-50.0], ids=[150_000]), truncated=True)
    assert unfit(bad, Filters()) is None
    assert unfit(bad, Filters(truncated=True)) == "truncated"
    assert unfit(bad, Filters(repetition=RepetitionFilter())) == "repetition"
    assert unfit(bad, Filters(gibberish=GibberishFilter())) == "gibberish"
    everything = Filters(truncated=True, repetition=RepetitionFilter(), gibberish=GibberishFilter())
    assert unfit(rollout(sample([SURE, UNSURE])), everything) is None


def test_without_sampled_tokens_the_rest_still_trains():
    kept, count = without_sampled_tokens(sample([-1.0] * 3, [0, 1, 1], ce_weights=[0.1, 0, 0]))
    assert count == 2 and not kept.mask.numpy().any()
    assert trains(kept)
    assert not trains(without_sampled_tokens(sample([-1.0] * 3))[0])


def test_zero_advantage_tokens_leave_the_component_and_are_counted_once():
    kept, count = without_zero_advantage(sample([-1.0] * 4, [0, 1, 1, 1], advantages=[0, 0, 0.5, 0]))
    assert count == 2
    assert kept.rl_weights.numpy().tolist() == [1, 0, 1, 0]
    assert without_zero_advantage(kept) == (kept, 0)
    untouched = sample([-1.0] * 2, advantages=[1, 2])
    assert without_zero_advantage(untouched) == (untouched, 0)


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ({}, True),
        ({"rl_weights": [0, 0]}, False),
        ({"rl_weights": [0, 0], "ce_weights": [0, 1]}, True),
        ({"rl_weights": [0, 0], "ref_kl_weights": [1, 0]}, True),
    ],
)
def test_a_member_of_any_component_trains(streams, expected):
    assert trains(sample([-1.0] * 2, **streams)) is expected
