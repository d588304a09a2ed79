"""Everything that lies in a run directory about one attempt, read once, without changing anything."""

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prime_hpc.cluster.files import list_fresh
from prime_hpc.cluster.lease import FILE as LEASE
from prime_hpc.cluster.live import Live
from prime_hpc.cluster.memory import HostMemory, host_memory
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import COMPLETE_MARK
from prime_hpc.errors import CommandLineError, ConfigProblem, nearest_name
from prime_hpc.observe.events import BEATS, Beat, Event, Lease, Record, read_each, read_events, read_struct
from prime_hpc.observe.guard import read_changes, read_warnings
from prime_hpc.observe.logs import LogFile, find_logs
from prime_hpc.observe.monitor import read_metrics
from prime_hpc.plan import run_plan
from prime_hpc.plan.run_plan import RunPlan

DEFAULT_HANG_S = 120.0
DEFAULT_LEASE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """An attempt as its files show it at epoch second `now`. Records and beats are by process; logs lie there unread.

    `plan` is that of the newest attempt; of an older one only logs and events are left. `host` is the reader's machine.
    """

    paths: RunPaths
    plan: RunPlan
    attempt: int
    attempts: list[int]
    now: float
    records: dict[str, Record]
    beats: dict[str, Beat]
    events: list[Event]
    lease: Lease | None
    complete: bool
    logs: list[LogFile]
    host: HostMemory | None = None

    @property
    def newest(self) -> bool:
        return self.attempt == max(self.attempts, default=self.attempt)

    @property
    def lease_s(self) -> float:
        return self.plan.config.get("cluster", {}).get("lease_s", DEFAULT_LEASE_S)

    @property
    def hang_s(self) -> float:
        """Without a sign of life for this long, a process is taken to hang."""
        return self.plan.config.get("recovery", {}).get("hang_s", DEFAULT_HANG_S)

    @property
    def live(self) -> bool:
        """The supervisor has given a sign within the lease and has not said that it is over."""
        if self.lease is None or self.complete or self.ending:
            return False
        return self.now - self.lease.beat <= self.lease_s

    @property
    def over(self) -> bool:
        """The attempt worked once and does no more, in distinction to one that waits for its supervisor to start."""
        return not self.live and (self.complete or self.ending is not None or self.lease is not None)

    @property
    def serves(self) -> bool:
        """The run is a fleet, which makes no steps."""
        return self.plan.config.get("mode") == "serve"

    @cached_property
    def ending(self) -> Event | None:
        """The event that ended the attempt."""
        return next((event for event in self.events if event.ends_attempt), None)

    @cached_property
    def changes(self) -> Live:
        """What was changed while the run worked."""
        return read_changes(self.paths)

    @cached_property
    def warnings(self) -> list[str]:
        """Metrics that are past their limits."""
        return read_warnings(self.paths) if self.newest else []

    @cached_property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """Rows by step."""
        return read_metrics(self.paths.metrics)

    @cached_property
    def steps(self) -> dict[int, dict[str, Any]]:
        """Rows of steps that the trainer reported; where a run only samples, of every batch."""
        sampled = self.plan.config.get("mode") == "sample"
        return {step: row for step, row in self.metrics.items()
                if "loss" in row or (sampled and "batch/rollouts" in row)}  # fmt: skip

    @property
    def max_steps(self) -> int:
        """Steps of the run; 0 of one that evaluates alone."""
        config = self.plan.typed_config()
        return 0 if config.evaluates_alone else config.max_steps

    @property
    def processes(self) -> list[str]:
        """Names of the attempt's processes."""
        if self.newest:
            return [process.name for process in self.plan.processes]
        return sorted({log.process for log in self.logs})

    def members(self, unit: str) -> list[str]:
        """The processes that restart together as `unit`; a process is a unit too."""
        return [name for name in self.processes if unit in (name, name.rpartition("-")[0])]

    def component(self, process: str) -> str:
        """The component of a process or unit; of one that the plan does not know, the first word of its name."""
        known = {p.name: p.component for p in self.plan.processes}
        return known.get(process, process.partition("-")[0])

    def log(self, process: str, restart: int = 0) -> LogFile | None:
        """The log of a start of a process."""
        return next((log for log in self.logs if (log.process, log.restart) == (process, restart)), None)


def read_run(run_dir: Path, attempt: int | None = None) -> RunFacts:
    """Read an attempt of a run, by default the newest.

    Raises:
        CommandLineError: there is no such run or attempt.
        SchemaMismatch: the run belongs to another version of this product.
    """
    paths = RunPaths(run_dir)
    if not paths.plan.exists():
        raise CommandLineError([_no_run(run_dir)])
    plan = run_plan.load(paths.plan)
    attempts = list_attempts(paths)
    if attempt is not None and attempt not in attempts:
        expected = f"one of {', '.join(map(str, attempts)) or 'none yet'}"
        raise CommandLineError([ConfigProblem("--attempt", attempt, expected)])
    return _read(paths, plan, attempts, attempt or max(attempts, default=plan.attempt))


def list_attempts(paths: RunPaths) -> list[int]:
    """Numbers of the attempts that have logs, in order."""
    names = list_fresh(paths.root / "logs")
    return sorted(int(name.removeprefix("attempt_")) for name in names if name.startswith("attempt_"))


def _read(paths: RunPaths, plan: RunPlan, attempts: list[int], attempt: int) -> RunFacts:
    lease = read_struct(paths.rendezvous / LEASE, Lease)
    events = read_events(paths.root, attempt)
    newest = attempt == max(attempts, default=attempt)
    marked = newest and COMPLETE_MARK in list_fresh(paths.rendezvous)
    return RunFacts(
        paths=paths,
        plan=plan,
        attempt=attempt,
        attempts=attempts,
        now=time.time(),
        records={r.process: r for r in read_each(paths.rendezvous, Record) if r.attempt == attempt},
        beats={b.process: b for b in read_each(paths.rendezvous / BEATS, Beat) if b.attempt == attempt},
        events=events,
        lease=lease if lease and lease.attempt == attempt else None,
        complete=marked or any(event.kind == "complete" for event in events),
        logs=find_logs(paths.logs(attempt)),
        host=host_memory(),
    )


def _no_run(run_dir: Path) -> ConfigProblem:
    siblings = [name for name in list_fresh(run_dir.parent) if (run_dir.parent / name / "plan.json").exists()]
    known = f"; in {run_dir.parent} there are {', '.join(sorted(siblings))}" if siblings else ""
    return ConfigProblem("RUN", str(run_dir), f"a run directory, with a plan.json{known}",
                         nearest_name(run_dir.name, siblings))  # fmt: skip
