"""Failures on demand at named points of the work, for tests of recovery. Without `PRIME_HPC_FAULTS` nothing happens.

The variable holds a JSON list of `Fault`. Points are named `<phase>.before`, `<phase>.during` and `<phase>.after`.
"""

import os
import signal
import sys
import time
from collections import Counter
from typing import Literal

import msgspec

from prime_hpc.errors import InfrastructureFailure

VARIABLE = "PRIME_HPC_FAULTS"


class Fault(msgspec.Struct, kw_only=True):
    """What happens to `process` when it reaches `point` for the `count`-th time since its `restart`-th start.

    `sleep` holds the work up there for `seconds`.
    """

    process: str
    point: str
    action: Literal["SIGKILL", "SIGSTOP", "raise", "sleep"]
    seconds: float = 0.0
    count: int = 1
    restart: int = 0

    @property
    def told(self) -> str:
        """What the process says before it happens, past loggers, which vLLM turns off."""
        return f"a fault that was asked for at {self.point}: {self.action}"


class Faults:
    """The faults that were asked of one process."""

    def __init__(self, process: str, restart: int):
        asked = msgspec.json.decode(os.environ.get(VARIABLE, "[]"), type=list[Fault])
        self._asked = [f for f in asked if (f.process, f.restart) == (process, restart)]
        self._reached: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        """The work is at `point`.

        Raises:
            InfrastructureFailure: a fault with action `raise` was asked for here.
        """
        if not self._asked:
            return
        self._reached[point] += 1
        for fault in self._asked:
            if (fault.point, fault.count) == (point, self._reached[point]):
                _act(fault)


def _act(fault: Fault) -> None:
    print(fault.told, file=sys.stderr, flush=True)
    if fault.action == "raise":
        raise InfrastructureFailure(f"a fault that was asked for at {fault.point}")
    if fault.action == "sleep":
        time.sleep(fault.seconds)
        return
    os.kill(os.getpid(), getattr(signal, fault.action))
