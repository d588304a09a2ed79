"""Watches the metrics of a run: warns where one is past its limit, pauses the run or has it save and leave."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from prime_hpc.cluster import control
from prime_hpc.cluster.files import read_json, write_json
from prime_hpc.cluster.live import Live, read_live, write_live
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import Role
from prime_hpc.config.guard import Limit, limits
from prime_hpc.errors import CorruptData, nearest_name

NAME = "the guard"
"""Who asks, where it has a run save and leave."""
SETTLED = 5
"""Rows of steps after which a metric that was in none of them is taken to be misspelt."""
EVALUATION = "eval/"
LATER = (EVALUATION, "probe/", "val/", "errors/", "cancelled/", "dropped/", "update/canary", "time/save")
"""Metrics that may come in later rows only, as what they tell of comes now and then, or never."""


@dataclass
class _Count:
    """Values in a row past a limit: all, and those up to which something followed."""

    past: int = 0
    answered: int = 0


class Guard:
    """Counts the values of each limited metric, acts, and keeps what is past its limit in `rendezvous/guard.json`."""

    def __init__(self, role: Role):
        self._role, self._given = role, role.config.guard
        self._limits = limits(role.config.mode, self._given)
        self._counts = {metric: _Count() for metric in self._limits}
        self._standing: dict[str, str] = {}
        self._seen: set[str] = set()
        self._rows = 0
        self._written: list[str] = []
        self._paused = read_changes(role.paths).paused
        role.paths.guard.unlink(missing_ok=True)  # of a start before, whose counts are gone

    def take(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """The metrics of a row of `step`, in which null stands for a value that is not finite."""
        self._begin_anew_after_a_pause()
        for metric, limit in self._limits.items():
            if metric in metrics:
                self._standing.pop(_stranger(metric), None)
                self._judge(step, metric, metrics[metric], limit)
        self._look_for_strangers(metrics)
        if self._written != (warnings := list(self._standing.values())):
            self._written = warnings
            write_json(self._role.paths.guard, {"warnings": warnings})

    def _begin_anew_after_a_pause(self) -> None:
        """Forget the values before and during a pause that is over."""
        if self._paused and not read_changes(self._role.paths).paused:
            self._paused = False
            for metric in self._limits:
                self._counts[metric] = _Count()
                self._standing.pop(metric, None)

    def _judge(self, step: int, metric: str, value: float | None, limit: Limit) -> None:
        count = self._counts[metric]
        how = _how_past(value, limit)
        if how is None:
            self._counts[metric] = _Count()
            self._standing.pop(metric, None)
            return
        count.past += 1
        if count.past < limit.steps:
            return
        row = f" for {count.past} values in a row" if count.past > 1 else ""
        self._standing[metric] = words = f"{metric} = {_number(value)} at step {step}, {how}{row}"
        again = limit.action != "warn" and count.past - count.answered >= limit.steps
        if not count.answered or again:
            count.answered = count.past
            self._act(limit, words)

    def _act(self, limit: Limit, words: str) -> None:
        paths, log = self._role.paths, self._role.log
        log.warning("guard: %s", words)
        if limit.action == "pause":
            self._paused = True
            if not (live := read_changes(paths)).paused:
                write_live(paths.live, msgspec.structs.replace(live, paused=True, why=words))
        elif limit.action == "stop":
            control.ask(paths.control, "drain", words, by=NAME)

    def _look_for_strangers(self, metrics: Mapping[str, float | None]) -> None:
        """Say, once, which metrics of the configuration were in none of the first rows of steps."""
        self._seen |= metrics.keys()
        of_step = not all(name.startswith(EVALUATION) for name in metrics)
        self._rows += of_step
        if not of_step or self._rows != SETTLED:
            return
        for metric in self._given.keys() & self._limits.keys() - self._seen:
            if not metric.startswith(LATER):
                nearest = nearest_name(metric, sorted(self._seen))
                hint = f"; did you mean {nearest!r}?" if nearest else ""
                self._standing[_stranger(metric)] = words = f"no row has had the metric {metric!r} yet{hint}"
                self._role.log.warning("guard: %s", words)


def read_warnings(paths: RunPaths) -> list[str]:
    """What is past its limit in the newest attempt, a sentence each."""
    return (read_json(paths.guard) or {}).get("warnings", [])


def read_changes(paths: RunPaths) -> Live:
    """What was changed while the run worked; nothing where somebody has spoilt the file, of which the orchestrator
    speaks."""
    try:
        return read_live(paths.live)
    except CorruptData:
        return Live()


def describe_pause(paths: RunPaths) -> str:
    """Why the run is held back, and how it goes on; empty where it is not."""
    live = read_changes(paths)
    if not live.paused:
        return ""
    return f"{live.why or '`tune` asked'}; to go on: python -m prime_hpc.commands.tune {paths.root} paused=false"


def _stranger(metric: str) -> str:
    """What a warning of a metric that does not come is kept under."""
    return f"guard.{metric}"


def _how_past(value: float | None, limit: Limit) -> str | None:
    """In which way a value is past a limit."""
    if value is None or not math.isfinite(value):
        return "not finite"
    if limit.above is not None and value > limit.above:
        return f"above {limit.above:g}"
    if limit.below is not None and value < limit.below:
        return f"below {limit.below:g}"
    return None


def _number(value: float | None) -> str:
    return "null" if value is None else f"{value:.4g}"
