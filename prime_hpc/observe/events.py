"""What the supervisor and the processes say about an attempt while it runs: events, beats and waits, for readers."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from prime_hpc.cluster.files import list_fresh

EVENTS = "events.jsonl"
BEATS = "beats"

T = TypeVar("T", bound=msgspec.Struct)


class Event(msgspec.Struct, kw_only=True):
    """One line of `events.jsonl`, which the supervisor alone writes.

    `unit` is what restarts together (`trainer`, `inference-0`), or None for the whole attempt; `restart` counts its
    starts from 0; an `exit_code` below 0 is a signal. `oom_kills` counts the processes that the kernel killed for want
    of memory since the attempt began, where the supervisor can tell. `line` is its place in the file, from 1.
    """

    time: float
    attempt: int
    kind: str
    unit: str | None = None
    process: str | None = None
    exit_code: int | None = None
    reason: str = ""
    restart: int = 0
    oom_kills: int = 0
    line: int = 0

    @property
    def ends_attempt(self) -> bool:
        """Whatever happens after it happens because of it."""
        return self.kind in ("complete", "interrupted") or (self.kind == "stop" and self.unit is None)


class Wait(msgspec.Struct, kw_only=True):
    """A wait in progress: for `what` from `owner`, since an epoch second, at most `deadline_s` seconds."""

    what: str
    owner: str
    since: float
    deadline_s: float


class Beat(msgspec.Struct, kw_only=True):
    """A sign of life: what a process is doing and, if it cannot go on by itself, what it waits for."""

    process: str
    attempt: int
    time: float
    restart: int = 0
    pid: int = 0
    host: str = ""
    doing: str = ""
    wait: Wait | None = None


class Record(msgspec.Struct, kw_only=True):
    """What a process last published in the rendezvous directory; `paused` says why it pauses."""

    process: str
    attempt: int
    state: str
    time: float
    pid: int = 0
    host: str = ""
    error: str = ""
    paused: str = ""
    step: int | None = None
    progress: dict[str, float | int | str | None] = {}


class Lease(msgspec.Struct):
    """The supervisor's last sign, in epoch seconds."""

    attempt: int
    beat: float


def read_events(run_dir: Path, attempt: int) -> list[Event]:
    """Events of `attempt` in order. A line that is torn is left out."""
    return [event for event in _events(run_dir / EVENTS) if event.attempt == attempt]


def read_each(directory: Path, kind: type[T]) -> Iterator[T]:
    """Every JSON file of `directory` that is a `kind`; the directory holds other files too."""
    for name in sorted(list_fresh(directory)):
        if name.endswith(".json") and (value := read_struct(directory / name, kind)):
            yield value


def read_struct(path: Path, kind: type[T]) -> T | None:
    """The `kind` in a JSON file, or None where it is absent or something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _events(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            event = msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError:  # torn: the supervisor died, or is just writing
            continue
        yield msgspec.structs.replace(event, line=number)
