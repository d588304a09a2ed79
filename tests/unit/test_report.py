"""Numbers of a batch, of an evaluation and of a run."""

import json

import numpy as np
import pytest

from prime_hpc.observe.evaluation import describe_evaluation
from prime_hpc.orchestrator.batches import Batch, Dropped
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.report import batch_metrics, describe_outcome, eval_metrics, losses, summarise
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


def played(source: str, reward: float | None, **fields: object) -> RolloutDone:
    made = rollout(source, reward)
    made.source = source
    for name, value in fields.items():
        setattr(made, name, value)
    return RolloutDone(worker="w", rollout=made)


def batch_of(**groups: list[RolloutDone]) -> Batch:
    """Groups by the name of their source."""
    made = [Group("g", source.rstrip("_"), 0, PolicyVersion(0, 0), len(done), done) for source, done in groups.items()]
    return Batch(3, [], made, Dropped(), {"s": np.array([0, 1, 1, 8]), "t": np.array([2])})


def test_a_batch_tells_how_its_rollouts_lie_apart() -> None:
    done = [played("s", float(i), completion_tokens=10 * i, num_turns=1 + i // 10) for i in range(11)]
    found = batch_metrics(batch_of(s=done))
    names = [f"train/s/{name}" for name in ("reward", "completion_tokens", "turns")]
    assert [[found[name + end] for end in ("", "/p10", "/p90", "/max")] for name in names] == [
        [5.0, 1.0, 9.0, 10.0], [50.0, 10.0, 90.0, 100.0], [12 / 11, 1.0, 1.0, 2.0],
    ]  # fmt: skip
    assert (found["staleness/mean"], found["staleness/max"], found["train/s/staleness"]) == (2.4, 8.0, 2.5)
    assert found["staleness/p90"] == pytest.approx(5.6) and found["train/t/staleness"] == 2.0


def test_rewards_phases_and_stop_conditions_are_told_by_name() -> None:
    one = played("s", 1.5, rewards={"exact": 1.0, "format": 0.5}, phases={"model": 2.0, "scoring": 1.0},
                 stop_condition="agent_completed", metrics={"exact": 0.25})  # fmt: skip
    other = played("s", 0.0, rewards={"exact": 0.0, "format": 0.0}, phases={"model": 4.0, "scoring": 0.0},
                   stop_condition="max_turns")  # fmt: skip
    for prefix, found in (("train/s", batch_metrics(batch_of(s=[one, other, played("s", None)]))),
                          ("eval/s", eval_metrics("s", [one.rollout, other.rollout]))):  # fmt: skip
        expected = {"rewards/exact": 0.5, "rewards/format": 0.25, "seconds/model": 3.0, "seconds/scoring": 0.5,
                    "stop/agent_completed": 0.5, "stop/max_turns": 0.5, "exact": 0.25}  # fmt: skip
        assert {name: found[f"{prefix}/{name}"] for name in expected} == expected
    assert [line for line in describe_evaluation(eval_metrics("s", [played("s", 1.0, rewards={"reward": 1.0}).rollout]))
            ] == ["s: reward 1, errors 0"]  # fmt: skip


def test_groups_are_solved_by_all_by_some_or_by_none() -> None:
    found = batch_metrics(batch_of(
        s=[played("s", 1.0), played("s", 1.0), played("s", None)], s_=[played("s", 0.5), played("s", 0.0)],
        s__=[played("s", 0.0), played("s", -0.5)], s___=[played("s", None)], t=[played("t", 1.0)],
    ))  # fmt: skip
    shares = ("solved_all", "solved_some", "solved_none")
    assert [found[f"train/s/{name}"] for name in shares] == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert [found[f"train/all/{name}"] for name in shares] == [0.5, 0.25, 0.25]


def test_rollouts_given_up_are_counted_by_reason_and_age() -> None:
    assert losses({"stale": [1.0, 3.0], "end": [2.0]}) == {
        "cancelled/stale": 2.0, "cancelled/stale/seconds": 2.0, "cancelled/end": 1.0, "cancelled/end/seconds": 2.0,
    }  # fmt: skip
