"""Requests to the supervisor: one file each in `rendezvous/control/`, which it acts upon and removes."""

import getpass
import time
import uuid
from pathlib import Path
from typing import Literal

import msgspec

from prime_hpc.cluster.files import list_fresh, write_atomic

Action = Literal["stop", "drain", "restart"]


class Request(msgspec.Struct, kw_only=True):
    """stop: end the run now. drain: finish the step, save and leave. restart: start `unit` again.

    `goes_on`: the run is drained since its job has to end, and goes on in another.
    """

    action: Action
    why: str
    by: str
    unit: str | None = None
    goes_on: bool = False
    time: float = 0.0

    @property
    def words(self) -> str:
        """Who asked, and why where that was said."""
        return f"{self.by} asked{f': {self.why}' if self.why else ''}"


def ask(control: Path, action: Action, why: str, *, unit: str | None = None, by: str | None = None,
        goes_on: bool = False) -> None:  # fmt: skip
    """Leave a request; `by` is the user when left out."""
    request = Request(action=action, why=why, by=by or getpass.getuser(), unit=unit, goes_on=goes_on, time=time.time())
    write_atomic(control / f"{uuid.uuid4().hex}.json", msgspec.json.encode(request))


def take(control: Path) -> list[Request]:
    """All requests, oldest first; they are gone afterwards."""
    paths = [control / name for name in list_fresh(control) if name.endswith(".json") and not name.startswith(".")]
    requests = [msgspec.json.decode(path.read_bytes(), type=Request) for path in paths]
    for path in paths:
        path.unlink()
    return sorted(requests, key=lambda r: r.time)
