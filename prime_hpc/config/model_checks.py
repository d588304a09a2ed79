"""Models that are not there, lack files or do not fit the run: what can be seen from their folders."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_hpc.config.json_files import read_json
from prime_hpc.config.model_files import SINGLE, has_tokenizer, missing_weights
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import components_of, engine_models
from prime_hpc.errors import ConfigProblem

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")
HUB_NAME = re.compile(r"(?!models/)[\w.-]+/[\w.-]+")
"""What may be a name on the Hugging Face hub. `models/` is where the experiments look for theirs."""
UNCHECKED = {
    "config.json": "memory, disk, pace and cost are not estimated, and seq_len was not checked",
    SINGLE: "files of weights were not looked for",
    "tokenizer_config.json": "tokenizer and chat template were not checked",
}


def find_folder_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """What is wrong with the policy's folder and its tokenizer's."""
    if config.model.shape:
        if config.mode != "bench":
            yield ConfigProblem("model.shape", "{...}", "to be left out: only mode=bench runs without weights")
        return
    path, absent = Path(config.model.path), [path.name for path in _may_lack(config)]
    if not config.model.path or not (path.is_dir() or "config.json" in absent):
        yield absent_folder("model.path", config.model.path)
        return
    model = {} if "config.json" in absent else read_json(path / "config.json")
    if model is None:
        yield ConfigProblem("model.path", config.model.path, "a directory with a readable config.json")
        return
    text = model.get("text_config") or model
    limit = next((text[key] for key in LENGTH_KEYS if key in text), None)
    if limit and config.seq_len > limit and config.mode != "bench":
        yield ConfigProblem("seq_len", config.seq_len, f"at most {limit}, the limit of {config.model.path}")
    if loads_policy(config) and SINGLE not in absent:
        yield from find_weight_problems("model.path", path)
    if "tokenizer_config.json" not in absent and config.mode != "bench":
        yield from _tokenizer(config)


def find_unchecked(config: RunConfig) -> list[str]:
    """What a dry run for Slurm left out, as it needs no model on the machine where it is made: a sentence for each."""
    return [f"{path} is not here: {UNCHECKED[path.name]}; submitting checks it" for path in _may_lack(config)]


def absent_folder(key: str, path: str) -> ConfigProblem:
    """The problem of a model that is no folder here."""
    expected = "an existing directory in Hugging Face layout"
    if Path(path).is_file():
        return ConfigProblem(key, path, expected, str(Path(path).parent))
    if HUB_NAME.fullmatch(path):
        expected += f"; if this is its name on the hub, `python -m tools.prefetch {path} --out FOLDER` fetches it"
    return ConfigProblem(key, path, expected)


def find_weight_problems(key: str, folder: Path) -> Iterator[ConfigProblem]:
    """The first file of weights that is missing."""
    if missing := missing_weights(folder):
        yield ConfigProblem(key, str(folder), f"a directory with weights in safetensors; {missing} is missing")


def find_tokenizer_problems(key: str, folder: Path) -> Iterator[ConfigProblem]:
    """A tokenizer of which only the configuration is there."""
    if not has_tokenizer(folder):
        yield ConfigProblem(key, str(folder), "a directory with a tokenizer; tokenizer.json is missing")


def find_engine_problems(key: str, folder: Path, tokenizer: Path, vllm: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Files that an engine of vLLM would miss; a `load_format` says that weights are something else."""
    if "load_format" not in vllm:
        yield from find_weight_problems(key, folder)
    yield from find_tokenizer_problems(key, tokenizer)


def loads_policy(config: RunConfig) -> bool:
    """Whether a process of the run reads the policy's weights from `model.path`, as files in safetensors."""
    parts = components_of(config)
    engines = "inference" in parts and None in engine_models(config) and "load_format" not in config.inference.vllm
    return engines or ("trainer" in parts and config.mode != "bench")


def _may_lack(config: RunConfig) -> list[Path]:
    """Files of the model that are absent and may be."""
    if not (config.model.path and config.launcher.name == "dry_run" and config.launcher.on_slurm):
        return []
    path, tokenizer = Path(config.model.path), Path(config.model.tokenizer or config.model.path)
    absent = [p for p in (path / "config.json", tokenizer / "tokenizer_config.json") if not p.exists()]
    return [*absent, path / SINGLE] if loads_policy(config) and missing_weights(path) == SINGLE else absent


def _tokenizer(config: RunConfig) -> Iterator[ConfigProblem]:
    key = "model.tokenizer" if config.model.tokenizer else "model.path"
    path = Path(config.model.tokenizer or config.model.path)
    tokenizer = read_json(path / "tokenizer_config.json")
    if tokenizer is None:
        yield ConfigProblem(key, str(path), "a directory with a tokenizer (tokenizer_config.json)")
        return
    yield from find_tokenizer_problems(key, path)
    if not tokenizer.get("chat_template") and not (path / "chat_template.jinja").exists():
        yield ConfigProblem(key, str(path), "a tokenizer with a chat template (chat_template.jinja)")
