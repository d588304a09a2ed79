"""Advantages of a group and their way onto the tokens of a sample."""

import numpy as np
import pytest

from prime_hpc.algorithms.advantages import advantages, with_advantage
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Sample


def sample(mask: list[int]) -> Sample:
    n = len(mask)
    return Sample(
        sample_id="s0",
        source="a",
        token_ids=Array.of(range(n), "i4"),
        mask=Array.of(mask, "bool"),
        logprobs=Array.of([0] * n, "f4"),
        versions=Array.of([0] * n, "i8"),
    )


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("grpo", [2], [0]),
        ("max_rl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("max_rl", [0, 0], [0, 0]),
        ("max_rl", [1, 1], [0, 0]),
        ("max_rl", [-1, 0], [0, 0]),
        ("grpo", [], []),
    ],
)
def test_values(name, rewards, expected):
    assert advantages(np.array(rewards, dtype=float), name).tolist() == expected


def test_grpo_sums_to_zero_and_does_not_divide_by_the_deviation():
    values = advantages(np.array([1, 0.5, 0.8]), "grpo")
    assert values.sum() == pytest.approx(0, abs=1e-15)
    assert values[0] - values[1] == pytest.approx(0.5)


def test_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        advantages(np.array([1.0, np.nan]), "grpo")


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="expected grpo or max_rl"):
        advantages(np.array([1.0]), "ppo")


@pytest.mark.parametrize(
    ("mask", "value", "expected"),
    [
        ([0, 1, 1], 0.5, [0, 0.5, 0.5]),
        ([0, 1, 0], 0.5, [0, 0.5, 0]),
        ([0, 0, 1, 1, 0, 1], [0.5, -0.5, 1], [0, 0, 0.5, -0.5, 0, 1]),
        ([0, 0], 1.0, [0, 0]),
    ],
)
def test_advantages_lie_on_the_mask(mask, value, expected):
    before = sample(mask)
    assert with_advantage(before, value).advantages.numpy().tolist() == expected
    assert before.advantages is None


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], []])
def test_list_of_wrong_length_does_not_align(values):
    with pytest.raises(ValueError, match="align"):
        with_advantage(sample([0, 1, 1]), values)
