"""SFT over the trainer's loop: the tiny model learns a handful of rows by heart."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_hpc.errors import ConfigurationError
from tests.trainer_support import TrainerRun, make_run

WORDS = ["abc", "hello", "world", "tree", "xyzzy", "sun"]


def say(word: str, reply: str | None = None) -> dict:
    """A row of one turn, the word backwards by default."""
    said = word[::-1] if reply is None else reply
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": said}]}


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_sft(root: Path, model: Path, *, ranks: int = 1, max_steps: int = 40, **probe: object) -> TrainerRun:
    """A run whose held-out rows repeat the training rows, so that learning by heart shows in the probe."""
    root.mkdir(exist_ok=True)
    probe = {"every": 10, "prompts": 6, "max_tokens": 8, "temperature": 0, **probe}
    sft = {"data": write_rows(root / "rows.jsonl", [say(word) for word in WORDS * 2]), "batch_size": 6, "probe": probe}
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


REFUSED = {"messages": [{"role": "tool", "content": "a"}]}
"""A row that the tiny model's chat template does not take."""


def test_a_row_is_rendered_when_a_step_needs_it(tmp_path, tiny_model):
    data = write_rows(tmp_path / "rows.jsonl", [say(word) for word in WORDS] + [REFUSED])
    sft = {"data": data, "batch_size": 2, "shuffle": False}
    make_run(tmp_path / "a", tiny_model, mode="sft", max_steps=3, trainer={"sft": sft}).train()
    with pytest.raises(ConfigurationError, match=rf"trainer.sft.data = '{data}:7'.*knows only user and assistant"):
        make_run(tmp_path / "b", tiny_model, mode="sft", max_steps=4, trainer={"sft": sft}).train()


def test_a_row_that_one_rank_cannot_render_ends_both(tmp_path, tiny_model):
    data = write_rows(tmp_path / "rows.jsonl", [say("abc"), REFUSED])
    run = make_run(tmp_path, tiny_model, ranks=2, mode="sft", trainer={"sft": {"data": data, "batch_size": 2}})
    with pytest.raises(pytest.fail.Exception, match="ConfigurationError.*\n.*trainer.sft.data.*:2'"):
        run.train_in_forks()


def test_every_rank_looks_for_mistakes_in_its_part_at_the_start(tmp_path, tiny_model):
    data = write_rows(tmp_path / "rows.jsonl", [say("abc")] * 300 + [{"messages": []}])
    run = make_run(tmp_path, tiny_model, mode="sft", trainer={"sft": {"data": data, "batch_size": 2}})
    with pytest.raises(ConfigurationError, match=":301'.*not empty"):
        run.train()


def test_rows_that_are_too_long_are_cut_and_those_without_a_reply_left_out(tmp_path, tiny_model):
    rows = [say("abc"), say("abc", "x" * 90), say("y" * 90), say("hello")]
    sft = {"data": write_rows(tmp_path / "rows.jsonl", rows), "batch_size": 4, "shuffle": False}
    run = make_run(tmp_path, tiny_model, mode="sft", max_steps=2, trainer={"sft": sft}).train()
    for step, row in enumerate(read_rows(run), 1):
        assert (row["sft/epoch"], row["sft/cut"], row["sft/left_out"]) == (step, 1, 1)
        assert row["tokens/trained"] == 9 + 64 + 13
    only = {"data": write_rows(tmp_path / "long.jsonl", [say("y" * 90)]), "batch_size": 1}
    with pytest.raises(ConfigurationError, match="trainer.sft.data.*message to train.*the first batch has none"):
        make_run(tmp_path / "long", tiny_model, mode="sft", trainer={"sft": only}).train()


def test_a_resumed_run_ends_bit_by_bit_as_one_that_was_not_interrupted(tmp_path, tiny_model):
    words = write_rows(tmp_path / "words.jsonl", [say(word) for word in WORDS])
    letters = write_rows(tmp_path / "letters.jsonl", [say(letter) for letter in "abcde"])
    sft = {"data": [{"path": words, "share": 2}, {"path": letters, "share": 1}], "batch_size": 4}

    def run(name: str, **start: object) -> TrainerRun:
        return make_run(tmp_path / name, tiny_model, mode="sft", max_steps=6, checkpoint={"every": 3},
                        trainer={"sft": sft}, **start).train()  # fmt: skip

    whole = run("whole")
    resumed = run("resumed", attempt=2, checkpoint_path=whole.paths.checkpoint(3))
    assert [row["loss"] for row in read_rows(resumed)] == [row["loss"] for row in read_rows(whole)][3:]
    theirs = load_file(resumed.paths.root / "model" / "model.safetensors")
    assert all(torch.equal(theirs[name], weight)
               for name, weight in load_file(whole.paths.root / "model" / "model.safetensors").items())  # fmt: skip
