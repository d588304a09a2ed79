"""Numbers of an evaluation."""

import pytest

from prime_hpc.orchestrator.report import eval_metrics, losses
from prime_hpc.transport.messages import Failure, Rollout, Seat


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


def test_each_seat_has_its_mean_reward_where_several_play() -> None:
    def seats(*rewards: tuple[str, float]) -> Rollout:
        played = [Seat(agent=agent, reward=reward, num_samples=1) for agent, reward in rewards]
        return Rollout(rollout_id="r", source="s", task_id="t", reward=0.0, seats=played)

    both = eval_metrics("s", [seats(("proposer", 0.5), ("solver", 1.0), ("solver", 0.0)), seats(("proposer", 0.0))])
    assert (both["eval/s/proposer/reward"], both["eval/s/solver/reward"]) == (0.25, 0.5)
    assert "eval/s/solver/reward" not in eval_metrics("s", [seats(("solver", 1.0))])


def test_rollouts_given_up_are_counted_by_reason_and_age() -> None:
    assert losses({"stale": [1.0, 3.0], "end": [2.0]}) == {
        "cancelled/stale": 2.0, "cancelled/stale/seconds": 2.0, "cancelled/end": 1.0, "cancelled/end/seconds": 2.0,
    }  # fmt: skip
