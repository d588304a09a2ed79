"""Advantages of a group, length penalties, and their way onto the tokens of a sample."""

import numpy as np
import pytest

from prime_hpc.algorithms import advantages
from prime_hpc.algorithms.advantages import with_advantage
from prime_hpc.algorithms.shaping import overlong, shaped_rewards
from prime_hpc.algorithms.trajectories import Trajectory
from prime_hpc.config.algorithm import LinearLengthPenalty, OverlongPenalty
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


def array(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("grpo", [2], [0]),
        ("grpo", [], []),
        ("max_rl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("max_rl", [0, 0], [0, 0]),
        ("max_rl", [1, 1], [0, 0]),
        ("max_rl", [-1, 0], [0, 0]),
        ("max_rl", [], []),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo", [1], [0]),
        ("rloo", [], []),
    ],
)
def test_values(name: str, rewards: list[float], expected: list[float]) -> None:
    assert getattr(advantages, name)(array(rewards)).tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("estimator", [advantages.grpo, advantages.max_rl, advantages.rloo])
def test_equal_rewards_have_no_advantage_at_all(estimator) -> None:
    """The mean of three times 0.1 is not 0.1 in floating point."""
    assert array([0.1] * 3).mean() != 0.1
    assert estimator(array([0.1] * 3)).tolist() == [0, 0, 0]
    assert advantages.grpo(array([0.1] * 3), std=True).tolist() == [0, 0, 0]


def test_grpo_sums_to_zero_and_divides_by_the_deviation_on_demand_only() -> None:
    rewards = array([1, 0.5, 0.8])
    plain, scaled = advantages.grpo(rewards), advantages.grpo(rewards, std=True)
    assert plain.sum() == pytest.approx(0, abs=1e-15)
    assert plain[0] - plain[1] == pytest.approx(0.5)
    assert scaled.std() == pytest.approx(1, rel=1e-5)
    assert scaled.tolist() == pytest.approx((plain / rewards.std()).tolist(), rel=1e-5)


def test_rloo_compares_with_the_others() -> None:
    rewards = array([1, 0.5, 0.8, -2])
    others = [np.delete(rewards, i).mean() for i in range(4)]
    assert advantages.rloo(rewards).tolist() == pytest.approx((rewards - others).tolist())


def test_reinforce_pp_normalises_over_the_batch() -> None:
    groups = [array([1, 0]), array([5, 5, 5]), array([0, 4])]
    values = advantages.reinforce_pp(groups)
    centred = array([0.5, -0.5, 0, 0, 0, -2, 2])
    assert [len(g) for g in values] == [2, 3, 2]
    assert np.concatenate(values).tolist() == pytest.approx((centred / centred.std()).tolist(), rel=1e-5)
    rewards = array([1, 0, 5, 5, 5, 0, 4])
    whole = advantages.reinforce_pp(groups, baseline="batch")
    assert np.concatenate(whole).tolist() == pytest.approx(((rewards - rewards.mean()) / rewards.std()).tolist(),
                                                           rel=1e-5)  # fmt: skip
    assert advantages.reinforce_pp([]) == []
    assert [v.tolist() for v in advantages.reinforce_pp([array([]), array([2.0])])] == [[], [0]]


def test_self_play_keeps_a_baseline_for_each_agent() -> None:
    baselines = {"white": 0.5}
    values = advantages.rae(array([1, -1, 0.5]), ["white", "black", "white"], baselines, decay=0.9)
    assert values.tolist() == pytest.approx([0.5, -1, 0.5 - 0.55])
    assert baselines == pytest.approx({"white": 0.9 * 0.55 + 0.1 * 0.5, "black": -0.1})


def test_peers_are_compared_among_themselves() -> None:
    values = advantages.among_peers(array([1, 10, 0, 20]), ["a", "b", "a", "b"])
    assert values.tolist() == [0.5, -5, -0.5, 5]


def trajectory(reward: float = 1.0, output: int = 10, other: int = 5, turns: int = 1) -> Trajectory:
    return Trajectory(reward, "", "e", other, output, turns, ())


def penalised(group: list[Trajectory], **weights: float) -> list[float]:
    unset = dict(output_weight=0.0, input_weight=0.0, turn_weight=0.0)
    shaped = shaped_rewards(group, LinearLengthPenalty(**{**unset, **weights}))
    return advantages.grpo(shaped).tolist()


def test_equal_lengths_are_penalised_alike() -> None:
    group = [trajectory(1.0), trajectory(0.0), trajectory(0.5)]
    shaped = shaped_rewards(group, LinearLengthPenalty())
    assert advantages.grpo(shaped).tolist() == pytest.approx([0.5, -0.5, 0])


def test_linear_penalty_takes_a_share_of_the_mean_reward() -> None:
    group = [trajectory(1.0, 10, 100, 1), trajectory(0.0, 20, 50, 4)]
    shaped = shaped_rewards(group, LinearLengthPenalty(output_weight=0.25, input_weight=0.1, turn_weight=0.2))
    assert shaped.tolist() == pytest.approx([1 - 0.5 * (0.125 + 0.1 + 0.05), 0 - 0.5 * (0.25 + 0.05 + 0.2)])


@pytest.mark.parametrize(
    ("weight", "group"),
    [
        ("output_weight", [trajectory(output=10), trajectory(output=20), trajectory(output=30)]),
        ("input_weight", [trajectory(other=5), trajectory(other=105)]),
        ("turn_weight", [trajectory(turns=1), trajectory(turns=4)]),
    ],
)
def test_each_length_counts_by_its_weight_alone(weight: str, group: list[Trajectory]) -> None:
    values = penalised(group, **{weight: 0.25})
    assert values == sorted(values, reverse=True) and len(set(values)) == len(values)
    assert sum(values) == pytest.approx(0, abs=1e-15)
    others = {"output_weight", "input_weight", "turn_weight"} - {weight}
    assert penalised(group, **dict.fromkeys(others, 0.25)) == [0] * len(group)


def test_overlong_penalty_falls_over_the_last_tokens() -> None:
    assert overlong(array([0, 80, 90, 95, 100, 500]), limit=100, cache=20).tolist() == [0, 0, -0.5, -0.75, -1, -1]
    group = [trajectory(1.0, 90), trajectory(0.0, 10)]
    assert shaped_rewards(group, OverlongPenalty(limit=100, cache=20)).tolist() == [0.5, 0]


def test_without_a_penalty_rewards_are_what_they_are() -> None:
    assert shaped_rewards([trajectory(0.25), trajectory(-3)], None).tolist() == [0.25, -3]
    assert shaped_rewards([], LinearLengthPenalty()).tolist() == []


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
