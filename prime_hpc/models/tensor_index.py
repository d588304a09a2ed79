"""Which file of a Hugging Face directory holds which tensor."""

import json
from pathlib import Path

from safetensors import safe_open

from prime_hpc.config.model_checks import find_weight_problems
from prime_hpc.config.model_files import INDEX, SINGLE
from prime_hpc.errors import ConfigurationError


def locate(directory: Path) -> dict[str, Path]:
    """Name of every tensor -> file that holds it.

    Raises:
        ConfigurationError: a file is missing.
    """
    if problems := list(find_weight_problems("model.path", directory)):
        raise ConfigurationError(problems)
    if (directory / INDEX).exists():
        names = json.loads((directory / INDEX).read_text())["weight_map"]
        return {name: directory / file for name, file in names.items()}
    with safe_open(directory / SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), directory / SINGLE)
