"""The checkpoint of another run that a new run begins from: which one that is, and whether it fits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prime_hpc.cluster.files import list_fresh
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.json_files import hf_config_of, read_json
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.errors import ConfigProblem, ConfigurationError, nearest_name
from prime_hpc.models.spec import text_of
from prime_hpc.plan.run_plan import load, read_forks
from prime_hpc.transport.checkpoints import MANIFEST, find_latest, read_manifest

KEY = "start_from.path"
ADAPTERS = ("rank", "alpha", "targets", "adapters")
"""Keys of `lora` that say what the trained parameters are."""
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "moe_intermediate_size", "num_experts", "n_routed_experts", "vocab_size",
         "tie_word_embeddings")  # fmt: skip
"""Keys of a model's config.json that say the same."""


def settle(config: RunConfig, paths: RunPaths, attempts: int) -> RunConfig:
    """`config` with the checkpoint itself in `start_from.path`; later attempts keep that of the first.

    Raises:
        ConfigurationError: there is no such checkpoint, or it does not fit the run.
    """
    if config.start_from.path is None:
        return config
    given = Path(config.start_from.path).absolute()
    before = load(paths.plan).typed_config().start_from.path if attempts else None
    if before is None or not Path(before).is_relative_to(given):
        before = str(_find(given))
        if problems := list(_find_misfits(Path(before), config)):
            raise ConfigurationError(problems)
    return replace(config, start_from=replace(config.start_from, path=before))


def _find(path: Path) -> Path:
    """A checkpoint, or the newest complete one of a run."""
    if (path / MANIFEST).exists():
        return path
    paths = RunPaths(path)
    found = find_latest(paths.checkpoints, read_forks(paths.forks))
    if found is None:
        beside = list_fresh(path.parent) if path.parent.is_dir() else []
        steps = [name for name in beside if (path.parent / name / MANIFEST).exists()]
        known = f"; beside it: {', '.join(sorted(steps))}" if steps else ""
        nearest = None if path.exists() else nearest_name(path.name, beside)
        raise ConfigurationError([ConfigProblem(KEY, str(path),
            f"a complete checkpoint, RUN/checkpoints/step_N, or a run that has one{known}",
            nearest and str(path.with_name(nearest)))])  # fmt: skip
    return found


def _find_misfits(checkpoint: Path, config: RunConfig) -> Iterator[ConfigProblem]:
    """Keys whose values lead to other parameters or optimiser states than those of the checkpoint."""
    before, now = read_manifest(checkpoint).config, to_dict(config)
    for key in ADAPTERS:
        old, new = before.get("lora", {}).get(key), now["lora"][key]
        if old != new and (key == "rank" or config.lora.on):
            yield ConfigProblem(f"lora.{key}", new, f"{old!r} as in {checkpoint}")
    if differences := _compare(before, config):
        yield ConfigProblem("model.path", config.model.path, f"a model of the sizes in {checkpoint}: {differences}")
    old, new = before.get("optimizer", {}).get("name"), config.optimizer.name
    if config.start_from.optimizer and old != new:
        yield ConfigProblem("optimizer.name", new, f"{old!r} as in {checkpoint}, or start_from.optimizer=false")


def _compare(before: dict[str, Any], config: RunConfig) -> str:
    """`hidden_size 64 rather than 32`, as far as both models' config.json are here."""
    old, new = read_json(Path(before.get("model", {}).get("path", "")) / "config.json"), hf_config_of(config.model)
    if not old or not new:
        return ""
    old, new = text_of(old), text_of(new)
    return ", ".join(f"{k} {old.get(k)} rather than {new.get(k)}" for k in SIZES if old.get(k) != new.get(k))
