"""Which processes of an attempt failed, when, and what their own logs say of it."""

import re
import signal
from dataclasses import dataclass, replace

from prime_hpc.observe.doctor.cause import ENGINE_DIED, HANG, KILLED, OUT_OF_HOST_MEMORY, UNCAUGHT, Cause
from prime_hpc.observe.doctor.causes import CAUSES, JOB_CAUSES, VAGUE
from prime_hpc.observe.events import Event, Record
from prime_hpc.observe.logs import LogFile, LogLine
from prime_hpc.observe.run_facts import RunFacts

TAIL_BYTES = 2**20
LAST_BREATH_S = 60.0
"""A process that logs normal life earlier than this before its end did not yet know of it."""
SETTLE_S = 2.0
"""The supervisor sees exits of the same moment within this; what it kills because of them ends later."""

_LIFE = re.compile(r"^(?:\(.*?\) )?(?:\d\d:\d\d:\d\d )?(?:INFO|WARNING|DEBUG)\b|^(?:\[rank\d+\]:)?\[[WI]\d{4} ")
_SURVIVED = re.compile(r"The run goes on|ERROR +\S+ rollout ")
_ERROR = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] |\[rank\d+\]: |[\d:]+ ERROR +\S+ )?"
    r"(?P<error>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure|Mismatch|Data|Exceeded|Interrupt)(?:: .*|$))"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A process that ended badly or stood still: epoch second, exit code below 0 for a signal, its own last error."""

    process: str
    time: float
    exit_code: int | None = None
    error: str = ""
    restart: int = 0
    event: Event | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a failure's log says: the cause, the groups of its pattern, and the line that gave it away."""

    failure: Failure
    cause: Cause
    groups: dict[str, str]
    log: LogFile | None = None
    line: LogLine | None = None

    @property
    def says_nothing(self) -> bool:
        """A suspect in whose log and record there is no failure at all."""
        failure = self.failure
        suspect = failure.event is not None and failure.process not in (failure.event.process, failure.event.unit)
        return suspect and self.cause is UNCAUGHT and self.line is None and not failure.error


def find_failures(facts: RunFacts) -> list[Failure]:
    """The first failure of every process that did not recover, in order of time; of a job step, its processes first.

    What happened after the attempt was told to end, and what the supervisor killed because of an earlier failure, is
    left out.
    """
    ended = _failed_events(facts.events)
    failures = {f.process: f for failure in reversed(ended) for f in [*_suspects(failure, facts), failure]}
    limit = facts.ending.time if facts.ending else facts.now
    for name, record in facts.records.items():
        if record.state != "failed":
            continue
        if name not in failures and record.time <= limit and not _recovered(record, facts):
            failures[name] = Failure(process=name, time=record.time, error=record.error)
        elif name in failures and record.time <= failures[name].time + SETTLE_S:
            failures[name] = replace(failures[name], time=record.time, error=record.error)
    return sorted(failures.values(), key=lambda failure: failure.time)


def examine(failure: Failure, facts: RunFacts) -> Finding:
    """Find the cause of a failure in its error, its log and its exit code."""
    log = facts.log(failure.process, failure.restart)
    lines = _last_breath(log.lines(TAIL_BYTES), failure.time) if log else []
    component = facts.component(failure.process)
    if failure.event and failure.event.kind == "hang":
        return Finding(failure=failure, cause=HANG, groups={"error": failure.event.reason}, log=log,
                       line=lines[-1] if lines else None)  # fmt: skip
    for table in (CAUSES, VAGUE):
        causes = [cause for cause in table if cause.component in (None, component)]
        found = _in_error(failure, causes, log, lines) or _in_log(failure, causes, log, lines)
        if found:
            return _with_memory(found, facts)
    line = next((line for line in reversed(lines) if _ERROR.match(line.text)), None)
    reason = failure.event.reason if failure.event else ""
    error = failure.error or (plain(line.text) if line else reason or f"exit code {failure.exit_code}, without a word")
    return Finding(failure=failure, cause=UNCAUGHT, groups={"error": error}, log=log, line=line)


def find_job_end(facts: RunFacts) -> Finding | None:
    """What the scheduler did to the whole job, said in any log of the attempt; the earliest where there are several."""
    found = [finding for log in facts.logs for finding in [_job_end(log, facts)] if finding]
    return min(found, key=lambda finding: finding.failure.time, default=None)


def examine_logs(facts: RunFacts) -> list[Finding]:
    """Causes in the logs alone, for an attempt that left neither events nor records."""
    failures = []
    for log in facts.logs:
        lines = log.lines(TAIL_BYTES)
        if lines and any(_ERROR.match(line.text) for line in lines):
            failures.append(Failure(process=log.process, time=lines[-1].time or 0.0, restart=log.restart))
    return [examine(failure, facts) for failure in failures]


def plain(text: str) -> str:
    """A log line without the clock and the name of who wrote it, where it reports an error."""
    found = _ERROR.match(text)
    return found["error"] if found else text.strip()


def _suspects(failure: Failure, facts: RunFacts) -> list[Failure]:
    """The processes of a unit that ended as one job step, whose exit code does not say which of them failed."""
    if failure.process in facts.processes or (failure.event and failure.event.kind == "hang"):
        return []
    return [replace(failure, process=name, exit_code=None) for name in facts.members(failure.process)]


def _failed_events(events: list[Event]) -> list[Failure]:
    failures: list[Failure] = []
    dooming: list[Event] = []
    for event in events:
        if event.ends_attempt:
            break
        if event.kind in ("recovered", "degrade"):
            failures = [f for f in failures if f.event and f.event.unit != event.unit]
        elif event.kind == "restart":
            dooming = [d for d in dooming if d.unit != event.unit]
        elif event.kind == "stop":
            dooming.append(event)
        elif event.kind in ("hang", "asked") or (event.kind == "exit" and event.exit_code != 0
                                                 and not _follows(event, dooming)):  # fmt: skip
            dooming.append(event)
            failures.append(Failure(process=event.process or event.unit or "", time=event.time, restart=event.restart,
                                    exit_code=_signal(event.exit_code), event=event,
                                    error=event.reason if event.kind == "asked" else ""))  # fmt: skip
    return failures


def _follows(event: Event, dooming: list[Event]) -> bool:
    """Whether an exit is the supervisor's doing: its unit hung or was stopped, or somebody failed a while ago."""
    ended_here = any(d.kind in ("hang", "stop") and d.unit == event.unit for d in dooming)
    failed_before = any(d.kind != "stop" and event.time - d.time > SETTLE_S for d in dooming)
    return ended_here or (failed_before and _signal(event.exit_code) in (-signal.SIGKILL, -signal.SIGTERM))


def _recovered(record: Record, facts: RunFacts) -> bool:
    later = (e for e in facts.events if e.kind in ("recovered", "degrade") and e.time > record.time)
    return any(record.process in facts.members(event.unit or "") for event in later)


def _signal(code: int | None) -> int | None:
    """An exit code with a signal below 0, also where a shell or srun added 128 to it."""
    return 128 - code if code is not None and 128 < code < 160 else code


def _last_breath(lines: list[LogLine], died: float) -> list[LogLine]:
    """Lines since the last sign of normal life well before the end; earlier errors were survived."""
    normal = (i for i in reversed(range(len(lines))) if _is_life(lines[i], died))
    return [line for line in lines[next(normal, -1) + 1 :] if not _SURVIVED.search(line.text)]


def _is_life(line: LogLine, died: float) -> bool:
    return line.time is not None and line.time < died - LAST_BREATH_S and bool(_LIFE.match(line.text))


def _in_error(failure: Failure, causes: list[Cause], log: LogFile | None, lines: list[LogLine]) -> Finding | None:
    """What the process itself said was its end, and where its log has it."""
    for cause in causes:
        if cause.pattern and (found := cause.pattern.search(failure.error)):
            line = next((line for line in reversed(lines) if cause.pattern.search(line.text)), None)
            return _finding(failure, cause, found, log, line)
    return None


def _in_log(failure: Failure, causes: list[Cause], log: LogFile | None, lines: list[LogLine]) -> Finding | None:
    errors = [line for line in lines if not _LIFE.match(line.text)]
    for cause in causes:
        if failure.exit_code in cause.codes:
            return _finding(failure, cause, None, log, lines[-1] if lines else None)
        for line in errors if cause.pattern else []:
            if cause.pattern and (found := cause.pattern.search(line.text)):
                return _finding(failure, cause, found, log, line)
    return None


def _finding(
    failure: Failure, cause: Cause, found: re.Match[str] | None, log: LogFile | None, line: LogLine | None
) -> Finding:
    groups = {name: text or "" for name, text in found.groupdict().items()} if found else {}
    return Finding(failure=failure, cause=cause, groups=groups, log=log, line=line)


def _with_memory(finding: Finding, facts: RunFacts) -> Finding:
    """A death without a reason, where the kernel counts kills for want of memory, was one of these."""
    record, event = facts.records.get(finding.failure.process), finding.failure.event
    here = facts.host if facts.host and record and record.host == facts.host.host else None
    counted = (event and event.oom_kills) or (here and here.oom_kills)
    return replace(finding, cause=OUT_OF_HOST_MEMORY) if finding.cause in (KILLED, ENGINE_DIED) and counted else finding


def _job_end(log: LogFile, facts: RunFacts) -> Finding | None:
    for line in log.lines(TAIL_BYTES):
        for cause in JOB_CAUSES:
            if cause.pattern and cause.pattern.search(line.text):
                failure = Failure(process=log.process, time=line.time or facts.now)
                return Finding(failure=failure, cause=cause, groups={}, log=log, line=line)
    return None
