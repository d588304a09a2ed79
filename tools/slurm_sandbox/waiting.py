"""Waiting with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

from prime_hpc.errors import DeadlineExceeded

POLL_S = 0.1
Found = TypeVar("Found")


def wait_for(ask: Callable[[], Found], wanted: str, owner: str, timeout_s: float) -> Found:
    """Ask until the answer is true, and give it.

    Raises:
        DeadlineExceeded: `owner` did not bring `wanted` within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise DeadlineExceeded("the sandbox", wanted, owner, timeout_s)
        time.sleep(POLL_S)
    return answer
