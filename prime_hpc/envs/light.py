"""Loading a tokenizer without torch, which it does not need, and which costs every worker seconds and memory."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HEAVY = "torch"
REMEMBERS = "transformers"
"""Imports torch if it is there, and decides by that what it offers from then on."""


@contextmanager
def without_torch() -> Iterator[None]:
    """Within this context torch is not found, unless the process has loaded it (or transformers) before.

    The modules of transformers loaded so are forgotten at the end: what an environment imports later is whole.
    """
    if HEAVY in sys.modules or REMEMBERS in sys.modules:
        yield
        return
    sys.modules[HEAVY] = None  # type: ignore[assignment]  # how Python itself marks what must not be imported
    advice = logging.getLogger(REMEMBERS)
    advice.disabled = True  # it would warn that torch is missing
    try:
        yield
    finally:
        advice.disabled = False
        for name in [name for name in sys.modules if name.partition(".")[0] in (HEAVY, REMEMBERS)]:
            del sys.modules[name]
