"""The attempt's lease: a heartbeat of the supervisor that fences off processes of an older attempt."""

import os
import sys
import threading
import time
from pathlib import Path

from prime_hpc.cluster.files import list_fresh, read_json, write_json
from prime_hpc.errors import InfrastructureFailure

FILE = "lease.json"
EXIT_FENCED = 75
"""Exit code of a process that left because its attempt lost the lease."""
OWN_PAUSE = 0.5
"""A pause between two checks that is longer than this share of `lease_s` is one of the process that checks."""


class LeaseKeeper:
    """Held by the supervisor alone: renews the lease of its attempt until it is closed.

    A supervisor whose node was given up may live on beside its successor. It ends at once when it sees the newer
    attempt, without stopping or removing anything: marks, secrets and steps of that name are the successor's now.
    """

    def __init__(self, directory: Path, attempt: int, lease_s: float):
        self._path = directory / FILE
        self._attempt = attempt
        self._period = min(lease_s / 6, 2.0)
        self._closed = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def leave_if_lost(self) -> None:
        """End this process where a newer attempt has begun."""
        lease = read_json(self._path)
        if lease and lease["attempt"] > self._attempt:
            print(f"leaving: attempt {lease['attempt']} has taken over", file=sys.stderr, flush=True)
            os._exit(EXIT_FENCED)

    def held(self) -> bool:
        """Whether no newer attempt has begun."""
        return (read_json(self._path) or {}).get("attempt") == self._attempt

    def _run(self) -> None:
        while not self._closed.wait(self._period):
            self._renew()

    def _renew(self) -> None:
        self.leave_if_lost()
        write_json(self._path, {"attempt": self._attempt, "beat": time.time()})


class LeaseReader:
    """A role's view of the lease. Age is counted from when a new beat was seen, so clock skew does not matter.

    Time in which this process itself stood still is not counted as silence of the supervisor; that a newer attempt has
    taken over is seen all the same.
    """

    def __init__(self, directory: Path, attempt: int, lease_s: float):
        self._directory = directory
        self._attempt = attempt
        self._lease_s = lease_s
        self._beat = None
        self._seen = self._last_look = time.monotonic()

    def check(self) -> None:
        """Return while this attempt holds the lease.

        Raises:
            InfrastructureFailure: a newer attempt runs, or the supervisor gave no sign for `lease_s` seconds.
        """
        list_fresh(self._directory)
        lease = read_json(self._directory / FILE)
        if lease and lease["attempt"] > self._attempt:
            raise InfrastructureFailure(f"attempt {lease['attempt']} has taken over from attempt {self._attempt}")
        now, pause = time.monotonic(), time.monotonic() - self._last_look
        self._last_look = now
        if pause > self._lease_s * OWN_PAUSE:
            self._seen += pause
        if lease and lease["beat"] != self._beat:
            self._beat, self._seen = lease["beat"], now
        if now - self._seen > self._lease_s:
            raise InfrastructureFailure(f"the supervisor gave no sign for {self._lease_s:.0f} s")
