"""Estimators of evaluations against their definitions: the share of all choices of k rollouts."""

from itertools import combinations

import pytest

from prime_hpc.algorithms.estimators import estimates, pass_at_k, pass_hat_k


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 2), (5, 5), (1, 1), (8, 3)])
def test_estimators_count_the_choices_of_k_rollouts(n: int, c: int) -> None:
    rewards = [1] * c + [0] * (n - c)
    for k in range(1, n + 1):
        choices = list(combinations(rewards, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(chosen) for chosen in choices) / len(choices), abs=1e-15)
        assert pass_hat_k(n, c, k) == pytest.approx(sum(all(chosen) for chosen in choices) / len(choices), abs=1e-15)


def test_large_counts_stay_exact() -> None:
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4, rel=1e-12)
    assert pass_hat_k(10_000, 9_999, 10_000) == 0.0


@pytest.mark.parametrize("counts", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int]) -> None:
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="say nothing about"):
            estimator(*counts)


def test_means_are_over_tasks() -> None:
    found = estimates([[1, 0, 0, 0], [1, 1, 1, 1], [0, 1]])
    assert found["avg@4"] == pytest.approx((0.25 + 1 + 0.5) / 3)
    assert found["pass@1"] == pytest.approx((0.25 + 1 + 0.5) / 3)
    assert found["pass@2"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert found["pass^2"] == pytest.approx((0 + 1 + 0) / 3)
    assert (found["pass@4"], found["pass^4"]) == (1.0, 0.5), "over the tasks that have four"
    assert "pass@8" not in found


def test_rewards_between_0_and_1_have_an_average_only() -> None:
    assert estimates([[0.5, 1.0], [0.0, 0.5]]) == {"avg@2": 0.5}
    assert estimates([[], []]) == {}
