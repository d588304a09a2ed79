"""What the supervisor did and why, one JSON object a line in `RUN/events.jsonl`."""

import time
from pathlib import Path

import msgspec

from prime_hpc.cluster.memory import oom_kills
from prime_hpc.observe.events import Event


class EventLog:
    """The one writer of a run's events: start, exit, hang, restart, recovered, degrade, drain, and how it ended."""

    def __init__(self, path: Path, attempt: int):
        self._file = path.open("ab", buffering=0)
        self._attempt = attempt
        self._oom_kills = oom_kills() or 0

    def add(self, kind: str, reason: str, *, unit: str | None = None, process: str | None = None,
            exit_code: int | None = None, restart: int = 0) -> None:  # fmt: skip
        """Append an event. `exit_code` is negative for a signal; `restart` counts earlier starts of the unit."""
        event = Event(time=time.time(), attempt=self._attempt, kind=kind, unit=unit, process=process,
                      exit_code=exit_code, reason=reason, restart=restart,
                      oom_kills=(oom_kills() or 0) - self._oom_kills)  # fmt: skip
        self._file.write(msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        self._file.close()
