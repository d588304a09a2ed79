"""Frozen models that are neither here nor elsewhere, or that do not speak the policy's tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_hpc.config.frozen import FrozenModel
from prime_hpc.config.json_files import read_json
from prime_hpc.config.model_checks import absent_folder, find_engine_problems
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem


def find_frozen_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Every conflict of a frozen model, with itself or with the policy."""
    for name, model in config.frozen.items():
        key = f"frozen.{name}"
        if name == config.model.served_name:
            yield ConfigProblem(key, name, "another name: the policy has this one")
        if (model.path is None) == (model.base_url is None):
            yield ConfigProblem(key, {"path": model.path, "base_url": model.base_url}, "either path or base_url")
        elif model.base_url is not None and model.model is None:
            yield ConfigProblem(f"{key}.model", None, "the name of the model at base_url")
        elif model.path is not None:
            yield from _local(config, key, model)


def _local(config: RunConfig, key: str, model: FrozenModel) -> Iterator[ConfigProblem]:
    path = Path(str(model.path))
    if config.launcher.name == "dry_run" and not path.exists():
        return
    facts = read_json(path / "config.json")
    if facts is None:
        damaged = ConfigProblem(f"{key}.path", model.path, "a directory with a readable config.json")
        yield damaged if path.is_dir() else absent_folder(f"{key}.path", str(model.path))
        return
    if config.launcher.name != "dry_run":
        yield from find_engine_problems(f"{key}.path", path, path, config.inference.vllm | model.vllm)
    limit = facts.get("max_position_embeddings")
    if limit and config.seq_len >= limit:
        yield ConfigProblem("seq_len", config.seq_len, f"less than {limit}, the limit of {model.path}: scoring takes a "
                            "place more")  # fmt: skip
    ours, theirs = (_vocabulary(Path(p)) for p in (config.model.tokenizer or config.model.path, path))
    if ours and theirs and ours != theirs:
        yield ConfigProblem(f"{key}.path", model.path, "a model with the policy's vocabulary, token by token")


def _vocabulary(path: Path) -> dict[str, Any] | None:
    tokenizer = read_json(path / "tokenizer.json")
    return tokenizer and tokenizer["model"].get("vocab")
