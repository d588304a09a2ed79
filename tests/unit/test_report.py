"""Numbers of an evaluation."""

import pytest

from prime_hpc.orchestrator.report import eval_metrics, losses
from prime_hpc.transport.messages import Failure, Rollout


def rollout(task: str, reward: float | None) -> Rollout:
    failure = Failure(kind="environment", type="Timeout", message="slow") if reward is None else None
    return Rollout(rollout_id=task, source="s", task_id=task, reward=reward, failure=failure)


def test_several_rollouts_of_a_task_give_estimates() -> None:
    found = eval_metrics("s", [rollout("a", 1.0), rollout("a", 0.0), rollout("b", 1.0), rollout("b", None)])
    assert found["eval/s/reward"] == pytest.approx(2 / 3)
    assert found["eval/s/errors"] == 1
    assert found["eval/s/avg@2"] == 0.75
    assert (found["eval/s/pass@1"], found["eval/s/pass@2"], found["eval/s/pass^2"]) == (0.75, 1.0, 0.0)


def test_one_rollout_a_task_has_its_reward_alone() -> None:
    found = eval_metrics("s", [rollout("a", 1.0), rollout("b", 0.0)])
    assert not [name for name in found if "@" in name or "^" in name]


def test_rollouts_given_up_are_counted_by_reason_and_age() -> None:
    assert losses({"stale": [1.0, 3.0], "end": [2.0]}) == {
        "cancelled/stale": 2.0, "cancelled/stale/seconds": 2.0, "cancelled/end": 1.0, "cancelled/end/seconds": 2.0,
    }  # fmt: skip
