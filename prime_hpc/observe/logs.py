"""Logs of an attempt: which file is whose, and when a line was written, from the clocks that libraries print."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from prime_hpc.cluster.files import list_fresh
from prime_hpc.cluster.log_lines import to_text

_NAME = re.compile(r"(?P<process>[\w.+-]+?)(?:\.restart_(?P<restart>\d+))?\.(?:log|out|err)")
_CLOCK = re.compile(r"^(?:\([^)]*\) |\[rank\d+\]:)*(?:[A-Z]+ +)?(?:\[[EWIF]\d{4} )?(?:\d\d-\d\d )?"
                    r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)\b")  # fmt: skip
_ISO = re.compile(r" AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_SKEW = timedelta(minutes=1)
_DISORDER = timedelta(hours=1)
"""Threads and buffers put lines out of order by less than this; a larger step back is midnight."""


@dataclass(frozen=True)
class LogLine:
    """A line of a log: its number from 1, and the epoch second of the last clock up to it, None where there is none."""

    number: int
    text: str
    time: float | None


@dataclass(frozen=True)
class LogFile:
    """The log of one start of a process; whatever is no process's (Slurm's own output) has its file's name."""

    path: Path
    process: str
    restart: int

    def lines(self, tail_bytes: int | None = None) -> list[LogLine]:
        """Its lines, or those of its last `tail_bytes` bytes. Dates are counted back from the last change."""
        with self.path.open("rb") as file:
            size = self.path.stat().st_size
            skipped = file.read(max(0, size - tail_bytes)).count(b"\n") if tail_bytes else 0
            content = file.read().decode(errors="replace")
        texts = content.removesuffix("\n").split("\n") if content else []
        texts = [text.removesuffix("\r").rpartition("\r")[2] for text in texts]  # progress bars overwrite themselves
        texts = [to_text(text) for text in texts]
        times = _times(texts, self.path.stat().st_mtime)
        return [LogLine(skipped + i, text, time) for i, (text, time) in enumerate(zip(texts, times, strict=True), 1)]


def find_logs(directory: Path) -> list[LogFile]:
    """The logs in an attempt's directory, by process and start."""
    found = [(match, name) for name in list_fresh(directory) if (match := _NAME.fullmatch(name))]
    logs = [LogFile(directory / name, match["process"], int(match["restart"] or 0)) for match, name in found]
    return sorted(logs, key=lambda log: (log.process, log.restart))


def _times(texts: list[str], ended: float) -> list[float | None]:
    """The time of each line. Clocks have no date: the last one is at most `ended`, and earlier ones go back from it."""
    stamps = [_clock(text) for text in texts]
    bound, times = datetime.fromtimestamp(ended) + _SKEW, {}
    for i in reversed(range(len(texts))):
        if isinstance(stamp := stamps[i], datetime):
            times[i] = stamp.timestamp()
        elif stamp is not None:
            day = datetime.combine(bound.date(), datetime.min.time())
            moment = day + stamp if day + stamp <= bound else day + stamp - timedelta(days=1)
            times[i], bound = moment.timestamp(), moment + _DISORDER
    return list(_fill(times, len(texts)))


def _fill(times: dict[int, float], count: int) -> Iterator[float | None]:
    last = None
    for i in range(count):
        last = times.get(i, last)
        yield last


def _clock(text: str) -> timedelta | datetime | None:
    """The time of day at the start of a line, or the whole date where Slurm gives one."""
    if iso := _ISO.search(text):
        return datetime.fromisoformat(iso[1])
    found = _CLOCK.match(text)
    return timedelta(hours=int(found["h"]), minutes=int(found["m"]), seconds=int(found["s"])) if found else None
