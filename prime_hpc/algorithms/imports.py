"""Functions of the user's, by import path."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from prime_hpc.errors import ConfigProblem, ConfigurationError


@cache
def import_function(path: str, key: str, expected: str) -> Callable[..., Any]:
    """The function `module.function` that the configuration names under `key`; `expected` says what it should be.

    Raises:
        ConfigurationError: there is no such module or function.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError([ConfigProblem(key, path, f"{expected} ({error})")]) from error
