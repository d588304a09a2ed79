"""Ends a process whose event loop stands still: code that blocks the loop can be neither cancelled nor timed out."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable

from prime_hpc.cluster.role import Role

EXIT_BLOCKED = 76
PERIOD_S = 0.5


class Watchdog:
    """Counts the seconds since the last `beat` and calls `on_silence` once they exceed what was allowed.

    It counts its own turns rather than read a clock: a process that was suspended is not to blame for that time.
    """

    def __init__(self, allowed_s: float, doing: str, on_silence: Callable[[str], None]):
        self._on_silence = on_silence
        self.allow(allowed_s, doing)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def allow(self, seconds: float, doing: str) -> None:
        """From now on silence may last `seconds`; `doing` says in the log what kept the process."""
        self._allowed, self._doing = seconds, doing
        self.beat()

    def beat(self) -> None:
        self._silent = 0.0

    def _watch(self) -> None:
        while self._silent <= self._allowed:
            time.sleep(PERIOD_S)
            self._silent += PERIOD_S
        self._on_silence(f"{self._doing} for more than {self._allowed:g} s")


def exit_process(role: Role) -> Callable[[str], None]:
    """Says what blocks, with the stacks of all threads, and leaves at once; the supervisor decides what follows."""

    def leave(what: str) -> None:
        faulthandler.dump_traceback(all_threads=True)
        role.log.error("%s; the stacks above show where. Environment code must not block its event loop", what)
        role.rendezvous.publish("failed", error=what)
        os._exit(EXIT_BLOCKED)

    return leave
