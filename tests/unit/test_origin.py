"""Which checkpoint a new run begins from, and what does not fit it, before anything starts."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse, to_dict
from prime_hpc.errors import ConfigurationError
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.transport.checkpoints import CheckpointManifest, partial_path, publish

SMALL = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 32}


def make_model(path: Path, **sizes: int) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMALL | sizes))
    return path


def make_config(root: Path, model: Path, *arguments: str) -> RunConfig:
    base = [f"model.path={model}", f"run.output_dir={root}", "run.name=new", "env.train=[{id: prime_hpc.envs.math}]"]
    return parse(OmegaConf.to_container(OmegaConf.from_dotlist([*base, *arguments])))


def save(run: Path, step: int, config: RunConfig) -> Path:
    """A checkpoint of `run`, as its manifest describes it."""
    partial = partial_path(run / "checkpoints", step)
    partial.mkdir(parents=True)
    manifest = CheckpointManifest(step=step, lineage=1, world=1, journal_offset=9, files={}, config=to_dict(config))
    return publish(partial, manifest)


def resolve(config: RunConfig) -> RunStart:
    return RunStart.resolve(config, experiment=None, origins=[])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_a_run_stands_for_its_newest_checkpoint_and_later_attempts_keep_that(tmp_path: Path, model: Path) -> None:
    old = tmp_path / "old"
    config = make_config(tmp_path, model, f"start_from.path={old}", "max_steps=9")
    save(old, 2, config)
    newest = save(old, 4, config)
    start = resolve(config)
    assert start.config.start_from.path == start.plan.config["start_from"]["path"] == str(newest)
    assert (start.plan.checkpoint, start.plan.forks[0].lineage, start.plan.forks[0].step) == (None, 1, 0)
    start.write()
    save(old, 6, config)
    again = resolve(make_config(tmp_path, model, f"start_from.path={old}", "resume=auto"))
    assert again.config.start_from.path == str(newest)
    assert [fork.lineage for fork in again.plan.forks] == [1]
    save(tmp_path / "new", 1, start.config)
    there = save(old, 8, config)
    with pytest.raises(ConfigurationError, match=f"start_from.path = '{there}': expected '{newest}' as in the check"):
        resolve(make_config(tmp_path, model, f"start_from.path={there}", "resume=latest"))


def test_a_key_that_the_checkpoint_does_not_know_had_its_default(tmp_path: Path, model: Path) -> None:
    config = make_config(tmp_path, model, "run.name=old")
    resolve(config).write()
    there = save(tmp_path / "old", 2, config)
    manifest = json.loads((there / "manifest.json").read_text())
    del manifest["config"]["start_from"], manifest["config"]["optimizer"]["embedding_lr"]
    (there / "manifest.json").write_text(json.dumps(manifest))
    again = [f"model.path={model}", "run.name=old", "resume=latest"]
    assert resolve(make_config(tmp_path, model, *again)).plan.checkpoint == str(there)
    with pytest.raises(ConfigurationError, match="optimizer.embedding_lr = 0.1: expected None as in the checkpoint"):
        resolve(make_config(tmp_path, model, *again, "optimizer.name=adamw", "optimizer.embedding_lr=0.1"))


def test_what_is_no_checkpoint_is_named_with_what_is(tmp_path: Path, model: Path) -> None:
    save(tmp_path / "old", 2, make_config(tmp_path, model))
    missing = tmp_path / "old" / "checkpoints" / "step_3"
    with pytest.raises(ConfigurationError, match=r"step_3'.*a complete checkpoint.*beside it: step_2.*step_2'?\?"):
        resolve(make_config(tmp_path, model, f"start_from.path={missing}"))
    with pytest.raises(ConfigurationError, match=r"ol'.*or a run that has one.*old"):
        resolve(make_config(tmp_path, model, f"start_from.path={tmp_path}/ol"))


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path, model: Path) -> None:
    there = save(tmp_path / "old", 2, make_config(tmp_path, model, "lora.rank=4"))
    large = make_model(tmp_path / "large", hidden_size=64, vocab_size=99)
    start = f"start_from.path={there}"
    with pytest.raises(ConfigurationError) as error:
        resolve(make_config(tmp_path, large, start, "lora.rank=8", "lora.alpha=16", "optimizer.name=muon"))
    found = {problem.key: problem.expected for problem in error.value.problems}
    assert found == {
        "lora.rank": f"4 as in {there}",
        "lora.alpha": f"32.0 as in {there}",
        "model.path": f"a model of the sizes in {there}: hidden_size 32 rather than 64, vocab_size 32 rather than 99",
        "optimizer.name": f"'adamw' as in {there}, or start_from.optimizer=false",
    }
    fresh = make_config(tmp_path, model, start, "lora.rank=4", "optimizer.name=muon", "start_from.optimizer=false")
    assert resolve(fresh).config.start_from.optimizer is False


def test_only_what_trains_given_weights_begins_from_a_checkpoint(tmp_path: Path, model: Path) -> None:
    for mode, refused in (("sample", True), ("serve", True), ("bench", True), ("rl", False), ("sft", False)):
        conflicts = find_conflicts(make_config(tmp_path, model, f"mode={mode}", "start_from.path=x"))
        assert ("start_from.path" in [problem.key for problem in conflicts]) is refused, mode
