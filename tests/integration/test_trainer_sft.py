"""SFT over the trainer's loop: the tiny model learns a handful of rows by heart."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from tests.trainer_support import TrainerRun, make_run

WORDS = ["abc", "hello", "world", "tree", "xyzzy", "sun"]


def make_sft(root: Path, model: Path, *, ranks: int = 1, max_steps: int = 40, **probe: object) -> TrainerRun:
    """A run whose held-out rows repeat the training rows, so that learning by heart shows in the probe."""
    root.mkdir(exist_ok=True)
    rows = [[{"role": "user", "content": w}, {"role": "assistant", "content": w[::-1]}] for w in WORDS * 2]
    data = root / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    sft = {"data": str(data), "batch_size": 6, "probe": {"every": 10, "prompts": 6, "max_tokens": 8, "temperature": 0}}
    sft["probe"].update(probe)
    return make_run(root, model, ranks=ranks, mode="sft", max_steps=max_steps, optimizer={"lr": 3e-3},
                    trainer={"sft": sft})  # fmt: skip


def read_rows(run: TrainerRun) -> list[dict]:
    return [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]


def test_rows_are_learnt_by_heart(tmp_path, tiny_model):
    run = make_sft(tmp_path, tiny_model).train()
    rows = read_rows(run)
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["step"] for row in rows if "probe/exact_match" in row] == [10, 20, 30, 40]
    assert rows[-1]["probe/exact_match"] == 1.0
    assert rows[0]["loss"] == pytest.approx(rows[0]["nll"]) == pytest.approx(3.47, abs=0.3)
    summary = json.loads(run.paths.summary.read_text())
    assert summary["steps"] == 40
    assert summary["loss_first"] == rows[0]["loss"]
    assert summary["loss_last"] == rows[-1]["loss"] < 0.1
    assert summary["probe_exact_match"] == 1.0
    assert (run.paths.rendezvous / "complete").exists()
    assert (tmp_path / "model" / "tokenizer.json").exists()
    assert not list(run.paths.weights.iterdir())


def test_training_stops_once_the_probe_reaches_its_mark(tmp_path, tiny_model):
    run = make_sft(tmp_path, tiny_model, every=2, stop_at=0.0).train()
    summary = json.loads(run.paths.summary.read_text())
    assert summary["steps"] == 2
    assert [row["step"] for row in read_rows(run)] == [1, 2]
    assert run.paths.checkpoint(2).exists()


def test_two_ranks_make_the_same_steps_as_one(tmp_path, tiny_model):
    losses = []
    for ranks in (1, 2):
        run = make_sft(tmp_path / str(ranks), tiny_model, ranks=ranks, max_steps=4, every=2)
        run = run.train() if ranks == 1 else run.train_in_forks()
        losses.append([row["loss"] for row in read_rows(run)])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_summary_is_of_the_whole_run_after_a_resume_that_finds_nothing_to_do(tmp_path, tiny_model):
    run = make_sft(tmp_path, tiny_model, max_steps=4, every=2).train()
    before = json.loads(run.paths.summary.read_text())
    again = TrainerRun(structs.replace(run.plan, attempt=2, checkpoint=str(run.paths.checkpoint(4)))).train()
    again = json.loads(again.paths.summary.read_text())
    assert {**again, "wall_s": 0} == {**before, "wall_s": 0}
