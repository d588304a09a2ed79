"""Which files of a model's folder a run cannot do without."""

from pathlib import Path

from prime_hpc.config.json_files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
"""Any of these makes a tokenizer, together with tokenizer_config.json."""


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold a model's weights; empty where an index does not say."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    return sorted(set((read_json(folder / INDEX) or {}).get("weight_map", {}).values()))


def missing_weights(folder: Path) -> str | None:
    """The first file of weights that is not there, or an index that names none; None where all are there."""
    files = weight_files(folder)
    return next((name for name in files if not (folder / name).is_file()), None if files else INDEX)


def has_tokenizer(folder: Path) -> bool:
    """Whether what the tokenizer knows is there."""
    return any((folder / name).is_file() for name in TOKENIZERS)
