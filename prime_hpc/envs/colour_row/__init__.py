"""Name the colours of a row of squares: a procedural environment with images, for demos and tests.

verifiers, which takes seconds to import, is loaded only for the classes that it asks for.
"""

from typing import Any

from prime_hpc.envs.colour_row.squares import draw

__all__ = ["ColourRowHarness", "ColourRowTaskset", "draw"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prime_hpc.envs.colour_row import taskset

    return getattr(taskset, name)
