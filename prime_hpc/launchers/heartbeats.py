"""Finds processes that hang: no sign of life, or life without progress and without a wait."""

import time
from dataclasses import dataclass
from typing import Any

from prime_hpc.cluster.beats import FOLDER
from prime_hpc.cluster.files import read_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.recovery import RecoveryConfig

OWN_PAUSE = 0.25
"""A pause between two looks that is longer than this share of `hang_s` is one of this process itself."""


@dataclass
class _Seen:
    """The last beat of a process and when (monotonic) it, and its progress, were new."""

    time: float
    beat_at: float
    progress: int
    progress_at: float


class Heartbeats:
    """Judges by this process's own clock when a beat was new, so that clocks of nodes need not agree.

    Time in which this process itself stood still, e.g. for a file system that did not answer, is nobody's silence.
    """

    def __init__(self, paths: RunPaths, recovery: RecoveryConfig):
        self._folder = paths.rendezvous / FOLDER
        self._recovery = recovery
        self._seen: dict[str, _Seen] = {}
        self._last_look = time.monotonic()

    def find_hang(self, process: str) -> str | None:
        """Why `process` is taken to hang, or None. A process that never beat is still starting."""
        beat = read_json(self._folder / f"{process}.json")
        now = self._now()
        if beat is None:
            return None
        seen = self._seen.get(process)
        if seen is None:
            self._seen[process] = _Seen(beat["time"], now, beat["progress"], now)
            return None
        if beat["time"] != seen.time:
            seen.time, seen.beat_at = beat["time"], now
        if beat["progress"] != seen.progress or beat["wait"]:
            seen.progress, seen.progress_at = beat["progress"], now
        return self._judge(beat, now - seen.beat_at, now - seen.progress_at)

    def _now(self) -> float:
        """This moment; a long pause since the last look is added to what every process is granted."""
        now, pause = time.monotonic(), time.monotonic() - self._last_look
        self._last_look = now
        if pause > self._recovery.hang_s * OWN_PAUSE:
            for seen in self._seen.values():
                seen.beat_at += pause
                seen.progress_at += pause
        return now

    def forget(self, process: str) -> None:
        """The process is gone; the next one of its name starts afresh."""
        self._seen.pop(process, None)
        (self._folder / f"{process}.json").unlink(missing_ok=True)

    def _judge(self, beat: dict[str, Any], silent_s: float, idle_s: float) -> str | None:
        if silent_s > self._recovery.hang_s:
            return f"no sign of life for {silent_s:.0f} s, {_last(beat)}"
        if idle_s > self._recovery.stuck_s:
            return f"no progress for {idle_s:.0f} s, {_last(beat)}"
        return None


def _last(beat: dict[str, Any]) -> str:
    wait = beat["wait"]
    waits = f", waiting for {wait['what']} of {wait['owner']}" if wait else ""
    return f"last seen {beat['doing']}{waits}"
