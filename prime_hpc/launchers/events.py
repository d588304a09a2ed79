"""What the supervisor did and why, one JSON object a line in `RUN/events.jsonl`."""

import json
import time
from pathlib import Path
from typing import Literal

EventKind = Literal["start", "exit", "hang", "restart", "recovered", "degrade", "stop", "drain", "interrupted",
                    "complete"]  # fmt: skip


class EventLog:
    """The one writer of a run's events."""

    def __init__(self, path: Path, attempt: int):
        self._file = path.open("a", buffering=1)
        self._attempt = attempt

    def add(self, kind: EventKind, reason: str, *, unit: str | None = None, process: str | None = None,
            exit_code: int | None = None, restart: int = 0) -> None:  # fmt: skip
        """Append an event. `exit_code` is negative for a signal; `restart` counts earlier starts of the unit."""
        self._file.write(json.dumps({"time": time.time(), "attempt": self._attempt, "kind": kind, "unit": unit,
                                     "process": process, "exit_code": exit_code, "reason": reason,
                                     "restart": restart}) + "\n")  # fmt: skip

    def close(self) -> None:
        self._file.close()
