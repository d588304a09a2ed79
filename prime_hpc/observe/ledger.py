"""What a run has cost: waits, starts, recoveries, idle time, node-hours; read from its directory, and from sacct."""

import shutil
import subprocess
from pathlib import Path

import msgspec
import numpy as np

from prime_hpc.cluster.files import read_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.observe.events import Event, read_events
from prime_hpc.observe.monitor import Row, read_metrics
from prime_hpc.observe.run_facts import list_attempts
from prime_hpc.plan import run_plan

IDLE = ("idle/inference", "idle/trainer")
JOULES_PER_KWH = 3.6e6


class Recovery(msgspec.Struct, frozen=True):
    """A unit that failed and came back: why, and the seconds between."""

    unit: str
    reason: str
    seconds: float


class AttemptLedger(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run; seconds, None for what did not happen.

    `queued_s` lies between submission and start; `startup_s` are the milestones up to the first step, by name, which
    only the newest attempt still has.
    """

    attempt: int
    queued_s: float | None
    startup_s: dict[str, float]
    first_step_s: float | None
    worked_s: float
    ending: str
    recoveries: list[Recovery]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """A run over all its attempts. `idle` are shares of the time since sampling began, by component.

    `energy_kwh` is what Slurm measured, None where it does not.
    """

    run: str
    attempts: list[AttemptLedger]
    idle: dict[str, float]
    nodes: int
    gpus: int
    energy_kwh: float | None = None

    @property
    def hours(self) -> float:
        return sum(attempt.worked_s for attempt in self.attempts) / 3600

    @property
    def node_hours(self) -> float:
        return self.hours * self.nodes

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus


def read_ledger(run_dir: Path, now: float) -> Ledger:
    """The ledger of the run in `run_dir` at epoch second `now`. The shape of the run is that of its newest attempt."""
    paths = RunPaths(run_dir)
    plan, rows, job = run_plan.load(paths.plan), read_metrics(paths.metrics), read_json(paths.job) or {}
    startup = {plan.attempt: read_json(paths.startup) or {}}
    steps = [row for row in rows.values() if "loss" in row]
    attempts = [(attempt, read_events(run_dir, attempt)) for attempt in list_attempts(paths)]
    return Ledger(
        run=plan.name,
        attempts=[
            _attempt(number, events, steps, startup.get(number, {}), now) for number, events in attempts if events
        ],
        idle={name.partition("/")[2]: value for name in IDLE if (value := _last(rows, name)) is not None},
        nodes=plan.nodes,
        gpus=plan.held_gpus,
        energy_kwh=_energy(job.get("job_ids", [])),
    )


def _attempt(number: int, events: list[Event], steps: list[Row], startup: dict, now: float) -> AttemptLedger:
    began, ending = events[0].time, next((event for event in events if event.ends_attempt), None)
    ended = ending.time if ending else max(now, events[-1].time)
    first = min((row["time"] for row in steps if began <= row["time"] <= ended), default=None)
    return AttemptLedger(
        attempt=number,
        queued_s=startup.get("queued_s"),
        startup_s=startup.get("seconds", {}),
        first_step_s=first - began if first else None,
        worked_s=ended - began,
        ending=f"{ending.kind}: {ending.reason}" if ending else "at work, or ended without a word",
        recoveries=_recoveries(events),
    )


def _recoveries(events: list[Event]) -> list[Recovery]:
    failed: dict[str, Event] = {}
    found = []
    for event in events:
        if event.unit and event.kind in ("exit", "hang"):
            failed.setdefault(event.unit, event)
        elif event.unit in failed and event.kind == "recovered":
            cause = failed.pop(event.unit)
            found.append(Recovery(event.unit, cause.reason, event.time - cause.time))
    return found


def _last(rows: dict[int, Row], name: str) -> float | None:
    """The newest value of a metric that counts from the start of the run."""
    return next((row[name] for row in reversed(rows.values()) if row.get(name) is not None), None)


def _energy(job_ids: list[str]) -> float | None:
    """Kilowatt-hours of these jobs, all starts counted, by Slurm's accounts."""
    if not job_ids or shutil.which("sacct") is None:
        return None
    command = [
        "sacct",
        "-X",
        "--duplicates",
        "--noheader",
        "--parsable2",
        "-o",
        "ConsumedEnergyRaw",
        "-j",
        ",".join(job_ids),
    ]
    joules = [float(text) for text in subprocess.run(command, capture_output=True, text=True).stdout.split()]
    return float(np.sum(joules)) / JOULES_PER_KWH if any(joules) else None
