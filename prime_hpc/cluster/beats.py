"""Signs of life: what a process is doing and whom it waits for, in `rendezvous/beats/<process>.json`."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from prime_hpc.cluster.files import write_json

FOLDER = "beats"


@dataclass(frozen=True)
class Wait:
    """A wait for `what` of process `owner`, which began at `since` (epoch) and may last `deadline_s` seconds."""

    what: str
    owner: str
    since: float
    deadline_s: float


class Heart:
    """Beats from a thread of its own: that it beats tells that the process runs, what it says tells of the work."""

    def __init__(self, rendezvous: Path, process: str, attempt: int, restart: int, period_s: float):
        self._path = rendezvous / FOLDER / f"{process}.json"
        self._identity = {"process": process, "attempt": attempt, "restart": restart, "pid": os.getpid(),
                          "host": socket.gethostname()}  # fmt: skip
        self._period_s = period_s
        self._count = 0
        self._waits: list[Wait] = []
        self.progress("starting")

    def start(self) -> None:
        """Beat until the process ends."""
        self._beat()
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def progress(self, doing: str) -> None:
        """The work has got on; `doing` says to what."""
        self._doing, self._count = doing, self._count + 1

    @contextmanager
    def waiting(self, what: str, owner: str, deadline_s: float) -> Iterator[None]:
        """Within this context the process waits for `what` of `owner`; the caller keeps the deadline."""
        wait = Wait(what, owner, time.time(), deadline_s)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)
            self._count += 1

    def _run(self) -> None:
        while True:
            time.sleep(self._period_s)
            self._beat()

    def _beat(self) -> None:
        waits = list(self._waits)
        write_json(self._path, {**self._identity, "time": time.time(), "doing": self._doing, "progress": self._count,
                                "wait": asdict(waits[0]) if waits else None})  # fmt: skip
