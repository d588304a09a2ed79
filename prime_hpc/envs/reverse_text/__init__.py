"""Reverse a text, letter by letter: a procedural environment for demos and tests.

verifiers, which takes seconds to import, is loaded only for the classes that it asks for.
"""

from typing import Any

from prime_hpc.envs.reverse_text.words import rows

__all__ = ["ReverseTextHarness", "ReverseTextTaskset", "rows"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prime_hpc.envs.reverse_text import taskset

    return getattr(taskset, name)
