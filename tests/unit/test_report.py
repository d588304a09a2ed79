"""Numbers of an evaluation."""

import json

import pytest

from prime_hpc.observe.evaluation import describe_evaluation
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.report import describe_outcome, eval_metrics, losses, summarise
from prime_hpc.transport.messages import Failure, PolicyVersion, Rollout, RolloutDone, Seat


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


def test_a_summary_has_the_figures_of_the_newest_evaluation_of_each_source_for_people_too() -> None:
    rows = {0: {"eval/s/reward": 0.1, "eval/s/errors": 0, "eval/t/reward": 0.2, "eval/t/errors": 1},
            4: eval_metrics("s", [rollout("a", 1.0), rollout("a", 0.0)]), 5: {"loss": 1.0}}  # fmt: skip
    summary = summarise(rows, 1.0, {})
    assert (summary["steps"], summary["eval/s/reward"], summary["eval/s/avg@2"]) == (5, 0.5, 0.5)
    assert describe_evaluation(summary) == [
        "s: reward 0.5, errors 0, avg@2 0.5, pass@1 0.5, pass^1 0.5, pass@2 1, pass^2 0",
        "t: reward 0.2, errors 1",
    ]
    assert describe_evaluation(summarise({1: {"loss": 1.0}}, 1.0, {})) == []


def test_the_rewards_of_groups_and_a_reply_are_told_in_a_line() -> None:
    def group(*ended: tuple[dict[str, float] | None, str]) -> Group:
        done = []
        for rewards, said in ended:
            made = rollout("a", None if rewards is None else sum(rewards.values()))
            made.rewards = rewards or {}
            messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
            done.append(RolloutDone(worker="w", rollout=made, messages=json.dumps(messages)))
        return Group("g", "s", 0, PolicyVersion(0, 0), len(done), done)

    groups = [group(({"exact": 0.0, "format": 0.5}, "no")), group(({"exact": 0.0, "format": 1.0}, "x\n" * 100))]
    reply = ("x\\n" * 80) + "..."
    assert describe_outcome(groups) == f"in the last, exact is 0, format is 0.5 to 1 and a reply '{reply}'"
    assert describe_outcome([group((None, ""), (None, ""))]) == "in the last, all 2 rollouts failed"


def test_rollouts_given_up_are_counted_by_reason_and_age() -> None:
    assert losses({"stale": [1.0, 3.0], "end": [2.0]}) == {
        "cancelled/stale": 2.0, "cancelled/stale/seconds": 2.0, "cancelled/end": 1.0, "cancelled/end/seconds": 2.0,
    }  # fmt: skip
