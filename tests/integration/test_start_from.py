"""A new run that begins from another one's checkpoint, with other settings."""

from pathlib import Path

import pytest
import torch

from prime_hpc.errors import ConfigurationError
from prime_hpc.observe.run_facts import read_run
from prime_hpc.observe.status import take_status
from prime_hpc.plan.run_plan import Fork
from tests.integration.runs import ForkedRun
from tests.integration.test_local_runs import SKILL
from tests.trainer_support import TrainerRun, make_run, make_samples

STEADY = {"lr": 1e-3, "warmup_steps": 0}
MATRIX = "model.layers.0.self_attn.q_proj.weight"


def branch(root: Path, model: Path, checkpoint: Path, *, states: bool = True, **settings: object) -> TrainerRun:
    """A run of one step from `checkpoint`, on the batch that step 3 of `make_samples` is."""
    start = {"path": str(checkpoint), "optimizer": states}
    run = make_run(root, model, forks=[Fork(lineage=1, step=0)], start_from=start, max_steps=1, **settings)
    return run.record(1, samples=lambda step: make_samples(step + 2))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TrainerRun:
    """Three steps with a checkpoint after two."""
    run = make_run(tmp_path_factory.mktemp("origin"), tiny_model, max_steps=3, optimizer=STEADY,
                   checkpoint={"every": 2, "keep_last": 9}, update={"keep_versions": 9})  # fmt: skip
    return run.record(3).train()


def test_weights_and_optimiser_states_come_from_there_and_the_rest_from_the_configuration(
    tmp_path: Path, tiny_model: Path, origin: TrainerRun
) -> None:
    there = origin.paths.checkpoint(2)
    alike = branch(tmp_path / "alike", tiny_model, there, optimizer=STEADY).train()
    assert same(alike.weights("1.0"), origin.weights("0.2"))
    assert same(alike.weights("1.1"), origin.weights("0.3")), "step 1 is what step 3 was"

    decayed = branch(tmp_path / "decayed", tiny_model, there, optimizer={**STEADY, "weight_decay": 0.5}).train()
    shrunk = alike.weights("1.1")[MATRIX] - 1e-3 * 0.5 * origin.weights("0.2")[MATRIX]
    torch.testing.assert_close(decayed.weights("1.1")[MATRIX], shrunk, rtol=0, atol=1e-7)

    warm = branch(tmp_path / "warm", tiny_model, there, optimizer={"lr": 4e-3, "warmup_steps": 2, "embedding_lr": 1e-3})
    assert warm.train().report(1).metrics["optim/lr"] == 2e-3, "the schedule begins anew"


def test_without_optimiser_states_another_optimiser_may_go_on(tmp_path: Path, tiny_model: Path, origin) -> None:
    run = branch(tmp_path, tiny_model, origin.paths.checkpoint(2), states=False).train()
    assert same(run.weights("1.0"), origin.weights("0.2"))
    assert not same(run.weights("1.1"), origin.weights("0.3"))


def test_two_ranks_take_over_what_one_has_saved(tmp_path: Path, tiny_model: Path, origin: TrainerRun) -> None:
    two = branch(tmp_path, tiny_model, origin.paths.checkpoint(2), ranks=2, optimizer=STEADY).train_in_forks()
    for name, tensor in two.weights("1.1").items():
        torch.testing.assert_close(tensor, origin.weights("0.3")[name], rtol=0, atol=2e-6)


def test_adapters_go_on_over_the_same_model(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"lora": {"rank": 4, "serve": "merged"}, "optimizer": STEADY, "update": {"keep_versions": 9}}
    whole = make_run(tmp_path / "whole", tiny_model, max_steps=3, checkpoint={"every": 2, "keep_last": 9}, **settings)
    whole.record(3).train()
    run = branch(tmp_path / "new", tiny_model, whole.paths.checkpoint(2), **settings).train()
    assert same(run.weights("1.0"), whole.weights("0.2")) and same(run.weights("1.1"), whole.weights("0.3"))


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, tiny_model: Path, origin: TrainerRun) -> None:
    there = origin.paths.checkpoint(2)
    with pytest.raises(
        ConfigurationError, match=r"start_from.path = .*this very model; \d+ tensors differ: model\."
    ) as no:
        branch(tmp_path / "lora", tiny_model, there, lora={"rank": 4}).train()
    assert len(no.value.problems) == 1
    with pytest.raises(ConfigurationError, match=r"or start_from.optimizer=false; .*\.momentum_buffer none there"):
        branch(tmp_path / "muon", tiny_model, there, optimizer={"name": "muon"}).train()


def test_a_run_of_its_own_begins_from_the_newest_checkpoint_of_another(tmp_path: Path, tiny_model: Path) -> None:
    first = ForkedRun(tmp_path, tiny_model, "first", "max_steps=2", SKILL)
    code, text = first.wait()
    assert code == 0, text
    start = f"start_from.path={first.root}"
    second = ForkedRun(tmp_path, tiny_model, "second", "max_steps=2", start, "optimizer.lr=0.002",
                       "orchestrator.batch_size=8", SKILL)  # fmt: skip
    code, text = second.wait()
    assert code == 0, text
    checkpoint = str(first.root / "checkpoints" / "step_2")
    assert f"starts from {checkpoint}" in text.replace("\n", "")
    assert "engines serve v1.0" in second.log("orchestrator-0"), "the base model's v0.0 is not taken for it"
    assert second.cut == [1, 2] and second.reported == [1, 2]
    assert [row["optim/lr"] for row in second.metrics if "loss" in row] == [0.002, 0.002]
    facts = read_run(second.root)
    assert facts.plan.config["start_from"] == {"path": checkpoint, "optimizer": True}
    assert take_status(facts).started_from == checkpoint
