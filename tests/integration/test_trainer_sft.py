"""SFT over the trainer's loop: the tiny model learns a handful of rows by heart."""

import json
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def make_sft(root: Path, model: Path, *, ranks: int = 1, max_steps: int = 40, validation: dict | None = None,
             **probe: object) -> TrainerRun:  # fmt: skip
    """A run whose held-out rows repeat the training rows, so that learning by heart shows in the probe."""
    root.mkdir(exist_ok=True)
    probe = {"every": 10, "prompts": 6, "max_tokens": 8, "temperature": 0, **probe}
    sft = {"data": write_rows(root / "rows.jsonl", [say(word) for word in WORDS * 2]), "batch_size": 6, "probe": probe,
           "validation": validation or {}}  # fmt: skip
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
    run = make_sft(tmp_path, tiny_model, every=2, stop_at=0.0, validation={"every": 5, "rows": 2}).train()
    summary = json.loads(run.paths.summary.read_text())
    assert summary["steps"] == 2
    assert [row["step"] for row in read_rows(run)] == [1, 2]
    assert summary["validation_loss"] == read_rows(run)[1]["val/loss"], "which comes after the last step in any case"
    assert run.paths.checkpoint(2).exists()


def test_two_ranks_make_the_same_steps_as_one(tmp_path, tiny_model):
    found = []
    for ranks in (1, 2):
        held_out = {"every": 3, "rows": 5}
        run = make_sft(tmp_path / str(ranks), tiny_model, ranks=ranks, max_steps=4, every=2, validation=held_out)
        run = run.train() if ranks == 1 else run.train_in_forks()
        rows = read_rows(run)
        assert [row["step"] for row in rows if "val/loss" in row] == [3, 4]
        found.append(
            [row["loss"] for row in rows] + [rows[-1][name] for name in ("val/loss", "val/accuracy", "val/tokens")]
        )
    assert len(found[0]) == 4 + 3
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert rows[-1]["sft/epoch"] == 4, "of the rows that neither validation nor probe holds out"


@torch.no_grad()
def score(model_dir: Path, words: list[str]) -> tuple[float, float]:
    """Mean negative log-probability of the replies' tokens, and how many of them are the likeliest."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    losses, hits = [], []
    for word in words:
        ids = torch.tensor(tokenizer.apply_chat_template(say(word)["messages"], return_dict=False))
        replied = slice(2 + len(word), None)
        logits = model(ids[None]).logits[0, :-1][1 + len(word) :].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[replied], reduction="none"))
        hits.append(logits.argmax(-1) == ids[replied])
    return torch.cat(losses).mean().item(), torch.cat(hits).float().mean().item()


def test_validation_is_the_loss_and_accuracy_of_the_model_on_other_rows(tmp_path, tiny_model):
    words = ["abba", "loop", "x" * 20]
    rows = [*map(say, words), say("y" * 90)]
    sft = {"data": write_rows(tmp_path / "rows.jsonl", [say(word) for word in WORDS]), "batch_size": 6,
           "validation": {"every": 5, "data": write_rows(tmp_path / "other.jsonl", rows)}}  # fmt: skip
    run = make_run(tmp_path, tiny_model, mode="sft", max_steps=12, optimizer={"lr": 3e-3}, trainer={"sft": sft}).train()
    found = {row["step"]: row for row in read_rows(run) if "val/loss" in row}
    assert list(found) == [5, 10, 12]
    loss, accuracy = score(tmp_path / "model", words)
    assert found[12]["val/loss"] == pytest.approx(loss, rel=1e-4)
    assert found[12]["val/accuracy"] == pytest.approx(accuracy, rel=1e-6) and 0 < accuracy < 1
    assert found[12]["val/tokens"] == 5 + 5 + 21, "the row without a reply within seq_len is left out"
    summary = json.loads(run.paths.summary.read_text())
    assert (summary["validation_loss"], summary["validation_accuracy"]) == (
        found[12]["val/loss"], found[12]["val/accuracy"])  # fmt: skip


def test_a_validation_without_a_row_to_score_is_refused(tmp_path, tiny_model):
    data = write_rows(tmp_path / "rows.jsonl", [say("abc"), say("y" * 90)])
    sft = {"data": data, "batch_size": 1, "validation": {"every": 1, "rows": 1}}
    with pytest.raises(ConfigurationError, match="trainer.sft.validation.rows = 1: expected rows with a message"):
        make_run(tmp_path / "a", tiny_model, mode="sft", trainer={"sft": sft}).train()
    sft["validation"]["rows"] = 2
    with pytest.raises(ConfigurationError, match="trainer.sft.validation.rows = 2: expected fewer than the 2 rows"):
        make_run(tmp_path / "b", tiny_model, mode="sft", trainer={"sft": sft}).train()


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


def test_a_summary_is_of_the_whole_run_after_a_resume_that_finds_nothing_to_do(tmp_path, tiny_model):
    run = make_sft(tmp_path, tiny_model, max_steps=4, every=2, validation={"every": 2, "rows": 5}).train()
    before = json.loads(run.paths.summary.read_text())
    again = TrainerRun(structs.replace(run.plan, attempt=2, checkpoint=str(run.paths.checkpoint(4)))).train()
    again = json.loads(again.paths.summary.read_text())
    assert {**again, "wall_s": 0} == {**before, "wall_s": 0}
    assert None not in before.values()
