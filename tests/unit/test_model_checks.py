"""What a launch finds in the folder of a model, and what a role says that finds it later."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.frozen import FrozenModel
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import LauncherConfig, ModelConfig
from prime_hpc.errors import ConfigurationError
from prime_hpc.inference.served import require_files

SHARDS = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors", "c": "absent.safetensors"}}
WEIGHTS = "a directory with weights in safetensors; {} is missing"
TOKENIZER = "a directory with a tokenizer; tokenizer.json is missing"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of empty files that a launch takes."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def found(path: Path | str, mode: str = "rl", **settings: object) -> list[tuple[str, str]]:
    """Key and expectation of what is wrong with the models of a run."""
    config = RunConfig(mode=mode, seq_len=64, model=ModelConfig(path=str(path)), **settings)
    return [(p.key, p.expected) for p in find_conflicts(config) if p.key.startswith(("model", "frozen"))]


def sharded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    (folder / "model-2-of-2.safetensors").touch()
    (folder / "model.safetensors.index.json").write_text(json.dumps(SHARDS))


def damaged(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda folder: None, []),
        (lambda folder: (folder / "model.safetensors").unlink(), [WEIGHTS.format("model.safetensors")]),
        (sharded, [WEIGHTS.format("absent.safetensors")]),
        (damaged, [WEIGHTS.format("model.safetensors.index.json")]),
        (lambda folder: (folder / "tokenizer.json").unlink(), [TOKENIZER]),
        (lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"), []),
    ],
)  # fmt: skip
def test_a_missing_file_is_named(break_it: Callable[[Path], None], expected: list[str], model: Path) -> None:
    break_it(model)
    assert found(model) == [("model.path", words) for words in expected]
    role = SimpleNamespace(config=RunConfig(model=ModelConfig(path=str(model))), process=SimpleNamespace(frozen=None))
    try:
        require_files(role)  # as an engine does, where nothing was checked before
        told = []
    except ConfigurationError as error:
        told = [(problem.key, problem.expected) for problem in error.problems]
        assert not error.restartable
    assert told == found(model)


def test_only_what_is_loaded_must_be_there(model: Path) -> None:
    (model / "model.safetensors").unlink()
    teacher = {"teacher": FrozenModel(path=str(model))}
    lacking = ("model.path", WEIGHTS.format("model.safetensors"))
    assert found(model, "sft") == found(model, "serve") == [lacking]
    assert found(model, "bench") == []
    assert found(model, frozen=teacher) == [lacking, ("frozen.teacher.path", lacking[1])]
    assert found(model, launcher=LauncherConfig(name="dry_run")) == [lacking]
    assert found(model, launcher=LauncherConfig(name="dry_run", target="slurm_single")) == []
    config = RunConfig(mode="serve", seq_len=64, model=ModelConfig(path=str(model)))
    config.inference.vllm = {"load_format": "dummy"}
    assert find_conflicts(config) == []


def test_a_trainer_without_weights_is_not_started_again(model: Path) -> None:
    from prime_hpc.models.conversion import SAME  # here and not above: torch takes a second to load
    from prime_hpc.trainer.hf_weights import load_tensors

    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="model.safetensors is missing"):
        load_tensors({}, SAME, model)


def test_a_file_is_no_model_and_its_folder_is_named(model: Path) -> None:
    config = RunConfig(model=ModelConfig(path=str(model / "config.json")), mode="bench")
    assert [str(problem) for problem in find_conflicts(config)] == [
        f"model.path = '{model}/config.json': expected an existing directory in Hugging Face layout; did you mean "
        f"'{model}'?"
    ]


def test_a_name_on_the_hub_comes_with_how_to_fetch_it() -> None:
    layout = "an existing directory in Hugging Face layout"
    fetch = "; if this is its name on the hub, `python -m tools.prefetch Qwen/Qwen3-0.6B --out FOLDER` fetches it"
    assert found("Qwen/Qwen3-0.6B") == [("model.path", layout + fetch)]
    teacher = {"teacher": FrozenModel(path="Qwen/Qwen3-0.6B")}
    assert found("/Qwen/Qwen3-0.6B", frozen=teacher) == [
        ("model.path", layout),
        ("frozen.teacher.path", layout + fetch),
    ]
    assert found("models/tiny") == [("model.path", layout)]
