"""Rows for SFT from recorded rollouts: which are taken, and what the command says of the others."""

import json
from pathlib import Path

import pytest

from prime_hpc.commands.collect import main
from prime_hpc.config.sft_rows import open_rows
from prime_hpc.observe.records import RolloutRecorder, evaluations
from prime_hpc.transport.messages import Failure, Rollout, RolloutDone, Seat
from tests.unit.test_monitor import role

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


def done(name: str, task: str = "t", reply: object = None, source: str = "words", **fields) -> RolloutDone:
    messages = [{"role": "user", "content": task}, {"role": "assistant", "content": reply or name}]
    rollout = Rollout(rollout_id=name, source=source, task_id=task, **{"reward": 1.0, **fields})
    return RolloutDone(worker="env-0", rollout=rollout, messages=json.dumps(messages))


def record(root: Path, *rollouts: tuple[int, RolloutDone], folder: Path | None = None) -> None:
    made = role(root)
    made.paths.plan.write_bytes(made.plan.dump())
    recorder = RolloutRecorder(made, folder or root / "rollouts")
    for step, rollout in rollouts:
        recorder.add(step, rollout)
    for step in {step for step, _ in rollouts}:
        recorder.flush(step)


def collected(root: Path, *arguments: str) -> list[str]:
    out = root / "rows.jsonl"
    out.unlink(missing_ok=True)
    assert main([str(root), "--out", str(out), *arguments]) == 0
    return [json.loads(line)["rollout_id"] for line in out.read_text().splitlines()]


def test_rollouts_are_taken_by_reward_and_what_is_no_example_is_left_out(tmp_path: Path, capsys):
    failure = Failure(kind="environment", type="Timeout", message="600 s")
    image = [{"type": "image_url", "image_url": {"url": "digest"}}]
    record(
        tmp_path,
        (2, done("c", reward=0.5)),
        (1, done("a", reward=0.25)),
        (1, done("failed", reward=None, failure=failure)),
        (1, done("cut", truncated=True)),
        (1, done("seen", reply=image)),
        (2, done("again", reply="c")),
        (10, done("b", reward=1.0)),
    )
    assert collected(tmp_path) == ["a", "c", "b"], "in the order of steps"
    assert capsys.readouterr().out == (f"{tmp_path}/rows.jsonl: 3 rows of 1 tasks; left out: 1 failed, 1 truncated, "
                                       "1 with images, 1 said before\n")  # fmt: skip
    assert collected(tmp_path, "--min-reward", "0.5") == ["c", "b"]
    assert "1 reward below 0.5" in capsys.readouterr().out


def test_of_each_task_the_best_are_taken(tmp_path: Path, capsys):
    rewards = {"a": 0.5, "b": 1.0, "c": 0.0, "d": 1.0, "e": 1.0}
    record(tmp_path, *[(1, done(name, reward=reward)) for name, reward in rewards.items()],
           (2, done("x", task="u", reward=0.0)), (2, done("y", source="other", reward=0.0)))  # fmt: skip
    assert collected(tmp_path, "--best", "2") == ["b", "d", "x", "y"]
    assert "3 not among the best 2 of its task" in capsys.readouterr().out
    assert collected(tmp_path, "--best", "1", "--source", "words") == ["b", "x"]


def test_of_several_seats_the_first_is_taken_with_its_reward(tmp_path: Path):
    seats = [Seat(agent="x", reward=1.0, num_samples=1), Seat(agent="o", reward=-1.0, num_samples=1)]
    record(tmp_path, (1, done("a", reward=0.0, seats=seats)))
    assert collected(tmp_path, "--min-reward", "1") == ["a"]


def test_rows_are_those_that_sft_reads_with_tools(tmp_path: Path):
    messages = [{"role": "user", "content": "a"},
                {"role": "assistant", "provider_state": [{}], "tool_calls": [
                    {"id": "1", "type": "function", "name": "f", "arguments": "{\"x\": 1}"}]},
                {"role": "tool", "tool_call_id": "1", "content": "ü"}]  # fmt: skip
    rollout = Rollout(rollout_id="a", source="s", task_id="t", reward=1.0)
    record(tmp_path, (1, RolloutDone(worker="env-0", rollout=rollout, messages=json.dumps(messages),
                                     tools=json.dumps([TOOL]))))  # fmt: skip
    assert collected(tmp_path) == ["a"]
    row = open_rows(tmp_path / "rows.jsonl", "trainer.sft.data")[0]
    assert row.tools == [TOOL]
    assert row.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
        messages[2],
    ]  # fmt: skip


def test_evaluations_are_collected_apart_and_nothing_is_overwritten(tmp_path: Path, capsys):
    record(tmp_path, (3, done("e")), folder=evaluations(tmp_path / "rollouts", "words"))
    evaluations(tmp_path / "rollouts", "step_3.jsonl.zst").touch()  # where no source has a folder of its own
    assert main([str(tmp_path)]) == 2
    assert "nothing was sampled yet, or monitor.rollouts is off" in capsys.readouterr().err
    assert main([str(tmp_path), "--evaluation"]) == 0
    assert (tmp_path / "export" / "sft.jsonl").exists()
    assert main([str(tmp_path), "--evaluation"]) == 2
    assert "--out" in capsys.readouterr().err
    assert main([str(tmp_path), "--evaluation", "--min-reward", "2", "--out", str(tmp_path / "other")]) == 1
    assert "nothing was written; left out: 1 reward below 2" in capsys.readouterr().out
    assert main([str(tmp_path), "--evaluation", "--source", "wrods", "--out", str(tmp_path / "other")]) == 2
    assert "--source = 'wrods': expected one of words; did you mean 'words'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--best", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_told_with_the_nearest(tmp_path: Path, capsys):
    (tmp_path / "mine").mkdir()
    record(tmp_path / "mine", (1, done("a")))
    assert main([str(tmp_path / "mien")]) == 2
    assert "did you mean 'mine'?" in capsys.readouterr().err
