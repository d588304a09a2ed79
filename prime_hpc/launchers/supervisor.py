"""The supervisor: owns the processes of an attempt, finds those that died or hang, and starts them again by policy.

It knows restart units only; how a unit becomes processes is its `Starter`'s business (here, or as Slurm steps).
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prime_hpc.cluster import control
from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.cluster.lease import EXIT_FENCED
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import COMPLETE_MARK, DRAIN_MARK, EXIT_FINAL
from prime_hpc.config.recovery import FailurePolicy
from prime_hpc.config.run import RunConfig
from prime_hpc.launchers.events import EventLog
from prime_hpc.launchers.heartbeats import Heartbeats
from prime_hpc.launchers.rollback import roll_back
from prime_hpc.launchers.view import View
from prime_hpc.observe.events import DRAINED
from prime_hpc.observe.snapshot import take_snapshot
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.units import Unit

POLL_S = 0.2
LEAVE_S = 30.0
DUMP_S = 1.0
"""A process that hangs has this long to write down its stacks."""
SAME_FAILURES = 3
"""So many failures of a unit in a row with the same words and no step between them end the run."""

EVENT_OF_END = {"complete": "complete", "drained": "complete", "stopped": "interrupted", "failed": "stop",
                "fenced": "interrupted"}  # fmt: skip
"""How each kind of `Ending` is taken down."""


class Running(Protocol):
    """A unit that was started."""

    def exits(self) -> dict[str, int | None]:
        """Exit codes by process, None for one that runs."""
        ...

    def dump(self, process: str) -> None:
        """Ask a process for the stacks of its threads; one that is suspended is woken for it."""
        ...

    def last_words(self, process: str) -> str:
        """The end of its log."""
        ...


class Starter(Protocol):
    """Starts and ends units."""

    def start(self, unit: Unit, restart: int) -> Running: ...

    def stop(self, running: list[Running], grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds; nothing of the units is left on return."""
        ...


@dataclass(frozen=True)
class Failure:
    """Why a unit failed: the process that failed first, its exit code (None: it runs) and the reason in words.

    `kind` is how it was found, as the events call it: it left (exit), hangs (hang), or another wants it anew (asked).
    """

    process: str
    exit_code: int | None
    reason: str
    kind: str = "exit"


@dataclass
class _State:
    """A unit and its past."""

    unit: Unit
    running: Running | None = None
    restarts: int = 0
    due: float | None = None
    """When it is to be started again (monotonic)."""
    recent: deque[float] = field(default_factory=deque)
    failures: list[tuple[str, int]] = field(default_factory=list)
    """Reason and step of the latest failures in a row that were alike."""
    ready: bool = False


@dataclass(frozen=True)
class Ending:
    """How the attempt ended. `failure` is what ended it; `words` say more, e.g. the end of that process's log.

    `by`: who had the run drained. `goes_on`: not a person did, but since its job has to end. `fenced`: the units lost
    the lease that another job holds.
    """

    kind: str
    failure: Failure | None = None
    words: str = ""
    by: str = ""
    goes_on: bool = False

    @property
    def reason(self) -> str:
        """What is taken down of it."""
        match self.kind:
            case "stopped":
                return self.words
            case "drained":
                return f"{DRAINED}: {self.words}"
        return self.kind


class Supervisor:
    """One attempt of a run, or the part of it that is in one job: the `units`.

    `leads`: requests to the run are answered here. `alarm` is asked for a reason to drain the run.
    """

    def __init__(self, plan: RunPlan, config: RunConfig, paths: RunPaths, starter: Starter, view: View, *,
                 units: list[Unit], leads: bool = True, alarm: Callable[[], str | None] = lambda: None):  # fmt: skip
        self._plan, self._config, self._paths = plan, config, paths
        self._starter, self._view, self._leads, self._alarm = starter, view, leads, alarm
        self._states = [_State(unit) for unit in units]
        self._events = EventLog(paths.events, plan.attempt)
        self._hearts = Heartbeats(paths, config.recovery)
        self._complete_since: float | None = None
        self._drain: control.Request | None = None

    def run(self) -> Ending:
        """Start every unit and watch until the run is complete or cannot go on. Leaves processes to `stop`."""
        self._events.add("start", f"attempt {self._plan.attempt}")
        for state in self._states:
            self._start(state)
        while True:
            ending = self._tick()
            if ending:
                self._events.add(EVENT_OF_END[ending.kind], ending.reason)
                return ending
            time.sleep(POLL_S)

    def stop(self, reason: str | None = None) -> None:
        """End every process; `reason` is taken down where the run was interrupted."""
        if reason:
            self._events.add("interrupted", reason)
        self._starter.stop([s.running for s in self._states if s.running], self._config.launcher.stop_grace_s)
        self._events.close()

    def _tick(self) -> Ending | None:
        self._view.show(take_snapshot(self._paths, self._plan.processes))
        marks = list_fresh(self._paths.rendezvous)
        if COMPLETE_MARK in marks:
            return self._see_off(drained=DRAIN_MARK in marks)
        for request in self._requests():
            if request.action == "stop":
                return Ending("stopped", words=request.words)
            if ending := self._obey(request):
                return ending
        for state in self._states:
            failure = self._find_failure(state)
            if failure and COMPLETE_MARK in list_fresh(self._paths.rendezvous):
                return None  # what left meanwhile was free to
            ending = self._handle(state, failure) if failure else None
            if ending:
                return ending
            self._care(state)
        return None

    def _requests(self) -> list[control.Request]:
        if not self._leads:
            return []
        requests, reason = control.take(self._paths.control), self._alarm()
        if reason:
            requests.append(control.Request(action="drain", why=reason, by="the supervisor", goes_on=True))
        return requests

    def _see_off(self, *, drained: bool) -> Ending | None:
        """The run is complete: everybody leaves by themselves, within a while."""
        self._complete_since = self._complete_since or time.monotonic()
        left = [s for s in self._states if s.running and None in s.running.exits().values()]
        late = time.monotonic() - self._complete_since > LEAVE_S
        if left and not late:
            return None
        if not drained or not self._drain or self._config.evaluates_alone or self._step() >= self._config.max_steps:
            return Ending("complete")
        return Ending("drained", words=self._drain.words, by=self._drain.by, goes_on=self._drain.goes_on)

    def _obey(self, request: control.Request) -> Ending | None:
        """Drain the run, or start a unit again, which counts like a failure of it: what is asked for has to end too."""
        if request.action == "drain":
            if self._drain is None:
                self._drain = request
                self._events.add("drain", request.words)
                self._view.say(f"draining, as {request.words}")
                (self._paths.rendezvous / DRAIN_MARK).touch()
                if self._config.mode == "serve":  # nothing is to be saved
                    (self._paths.rendezvous / COMPLETE_MARK).touch()
            return None
        state = next((s for s in self._states if s.unit.name == request.unit and s.running), None)
        if state is None:
            return None
        return self._handle(state, Failure(state.unit.processes[0].name, None, request.words, "asked"))

    def _find_failure(self, state: _State) -> Failure | None:
        """What is wrong with a running unit, if anything."""
        if not state.running:
            return None
        exits = state.running.exits()
        failed = [name for name, code in exits.items() if code not in (None, 0)]
        if failed:
            first = min(failed, key=self._failed_at)
            return Failure(first, exits[first], self._reason(first) or _describe(exits[first]))
        gone = [name for name, code in exits.items() if code == 0]
        if gone and state.unit.component != "trainer":
            return Failure(gone[0], 0, "it left before the run was complete")
        for process in (p for p in state.unit.processes if exits[p.name] is None):
            hang = self._hearts.find_hang(process.name)
            if hang:
                state.running.dump(process.name)
                time.sleep(DUMP_S)
                return Failure(process.name, None, hang, "hang")
        return None

    def _handle(self, state: _State, failure: Failure) -> Ending | None:
        """Take a failure down and do what the policy says; returns an ending where the run cannot go on."""
        unit, policy = state.unit, self._policy(state)
        self._events.add(failure.kind, failure.reason, unit=unit.name, process=failure.process,
                         exit_code=failure.exit_code, restart=state.restarts)  # fmt: skip
        self._view.say(f"{failure.process} {'is wanted anew' if failure.kind == 'asked' else 'failed'}: "
                       f"{failure.reason}")  # fmt: skip
        words = state.running.last_words(failure.process)
        if failure.exit_code == EXIT_FENCED and not self._leads:
            return Ending("fenced", failure, words)
        if failure.exit_code == EXIT_FINAL or policy.on_failure == "stop" or self._comes_back(state, failure):
            return Ending("failed", failure, words)
        if policy.on_failure == "restart" and self._budget_left(state, policy):
            self._restart(state, failure)
            return None
        if self._has_deputy(state):
            self._end(state)
            self._events.add("degrade", failure.reason, unit=unit.name)
            self._view.say(f"going on without {unit.name}")
            return None
        return Ending("failed", failure, words)

    def _restart(self, state: _State, failure: Failure) -> None:
        """End what is left of the unit and start it again after a pause that grows with every restart."""
        self._end(state)
        state.recent.append(time.monotonic())
        recovery = self._config.recovery
        state.due = time.monotonic() + min(recovery.backoff_s * 2 ** (len(state.recent) - 1), recovery.backoff_max_s)
        state.restarts += 1
        self._events.add("restart", failure.reason, unit=state.unit.name, restart=state.restarts)

    def _end(self, state: _State) -> None:
        self._starter.stop([state.running], 0.0)
        state.running = None
        for process in state.unit.processes:
            self._forget(process.name)

    def _forget(self, process: str) -> None:
        """Remove what a process that is gone said of itself, so that nobody takes it for what the next one says."""
        self._hearts.forget(process)
        (self._paths.rendezvous / f"{process}.json").unlink(missing_ok=True)
        for name in list_fresh(self._paths.acks):
            if name.startswith(f"{process}.rank"):
                (self._paths.acks / name).unlink()

    def _care(self, state: _State) -> None:
        """Start a unit whose pause is over, and note when a restarted one is back at work."""
        if state.due is not None and time.monotonic() >= state.due:
            state.due = None
            if state.unit.component == "trainer":
                roll_back(self._plan, self._paths)
            self._start(state)
        elif state.running and not state.ready and self._at_work(state.unit):
            state.ready = True
            if state.restarts:
                self._events.add("recovered", "at work again", unit=state.unit.name, restart=state.restarts)

    def _start(self, state: _State) -> None:
        state.ready = False
        state.running = self._starter.start(state.unit, state.restarts)

    def _budget_left(self, state: _State, policy: FailurePolicy) -> bool:
        horizon = time.monotonic() - self._config.recovery.window_s
        while state.recent and state.recent[0] < horizon:
            state.recent.popleft()
        return len(state.recent) < policy.max_restarts

    def _comes_back(self, state: _State, failure: Failure) -> bool:
        """Whether it fails in the same words again and again while the run makes no step, or the fleet never serves."""
        if self._config.mode == "serve" and state.ready:
            state.failures = []
        seen = failure.reason, self._step()
        state.failures = [*state.failures, seen] if seen in state.failures else [seen]
        return failure.exit_code is not None and failure.exit_code > 0 and len(state.failures) >= SAME_FAILURES

    def _has_deputy(self, state: _State) -> bool:
        """Whether another running unit does the same work: an engine for an engine, a worker of the same source."""
        mine = _work(state.unit)
        return mine is not None and any(_work(s.unit) == mine and s.running for s in self._states if s is not state)

    def _policy(self, state: _State) -> FailurePolicy:
        return getattr(self._config.recovery, state.unit.component)

    def _record(self, process: str) -> dict:
        return read_json(self._paths.rendezvous / f"{process}.json") or {}

    def _reason(self, process: str) -> str | None:
        return self._record(process).get("error")

    def _failed_at(self, process: str) -> float:
        """When it said that it failed; one that could not say so died of something else, and first."""
        record = self._record(process)
        return record["time"] if record.get("error") else 0.0

    def _at_work(self, unit: Unit) -> bool:
        return all(self._record(p.name).get("state") not in (None, "starting") for p in unit.processes)

    def _step(self) -> int:
        return int(self._record("trainer-0").get("step") or 0)


def _work(unit: Unit) -> str | None:
    """What a unit of several alike does, None for one that is alone."""
    if unit.component == "inference":
        return "inference"
    return unit.name.rpartition("-")[0] if unit.component == "environment" else None


def _describe(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
