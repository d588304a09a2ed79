"""How processes of a run find each other: one JSON file a process, written whole, read with a deadline."""

import os
import socket
import time
from pathlib import Path
from typing import Any

from prime_hpc.cluster.files import list_fresh, read_json, write_json
from prime_hpc.errors import DeadlineExceeded

POLL_S = 0.1
STEP_VARIABLE = "PRIME_HPC_STEP"
"""Under Slurm: the job step of this process, as scancel takes it."""


class Rendezvous:
    """The `rendezvous/` directory as one process of one attempt sees it."""

    def __init__(self, directory: Path, process: str, attempt: int):
        self.directory = directory
        self.process = process
        self.attempt = attempt
        step = os.environ.get(STEP_VARIABLE)
        self._record: dict[str, Any] = {"step_id": step} if step else {}

    def publish(self, state: str, **facts: Any) -> None:
        """Announce this process's state; `facts` (address, port, ...) add to what it said before."""
        self._record.update(facts, process=self.process, attempt=self.attempt, state=state, pid=os.getpid(),
                            host=socket.gethostname(), time=time.time())  # fmt: skip
        write_json(self.directory / f"{self.process}.json", self._record)

    def read(self, process: str) -> dict[str, Any] | None:
        """What `process` last said in this attempt."""
        record = read_json(self.directory / f"{process}.json")
        return record if record and record["attempt"] == self.attempt else None

    def wait(self, process: str, key: str, timeout_s: float) -> Any:
        """The fact `key` of `process`, once it is published.

        Raises:
            DeadlineExceeded: it did not come within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            list_fresh(self.directory)
            record = self.read(process)
            if record and record.get(key) is not None:
                return record[key]
            if time.monotonic() > deadline:
                raise DeadlineExceeded(self.process, key, process, timeout_s)
            time.sleep(POLL_S)
