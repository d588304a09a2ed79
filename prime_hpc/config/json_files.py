"""JSON of model directories, as far as checks need it."""

import json
from pathlib import Path
from typing import Any

from prime_hpc.config.sections import ModelConfig


def hf_config_of(model: ModelConfig) -> dict[str, Any] | None:
    """A model's config.json, or what stands for it; None where there is neither."""
    return model.shape or read_json(Path(model.path) / "config.json")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, or None where there is no file or no object in it."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: no JSON, or no text at all
        return None
    return value if isinstance(value, dict) else None
