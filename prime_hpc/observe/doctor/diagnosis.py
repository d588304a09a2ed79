"""From what lies in a run directory to the answer: the first failing process, its cause, the evidence, the remedy."""

import re
from typing import Literal

import msgspec

from prime_hpc.cluster.lease import FILE as LEASE
from prime_hpc.observe import waits
from prime_hpc.observe.doctor.blame import SUPERVISOR, Blame, find_first
from prime_hpc.observe.doctor.cause import (
    ERROR_BUDGET,
    GUARD,
    HANG,
    PREEMPTED,
    STOPPED,
    SUPERVISOR_LOST,
    TIME_LIMIT,
    UNCAUGHT,
    Cause,
    how_to_install,
)
from prime_hpc.observe.doctor.evidence import MAX_TEXT, Evidence, evidence_of, find_text, followers
from prime_hpc.observe.doctor.failures import (
    Failure,
    Finding,
    examine,
    examine_logs,
    find_failures,
    find_job_end,
)
from prime_hpc.observe.evaluation import describe_evaluation, newest_evaluation
from prime_hpc.observe.events import EVENTS, Event
from prime_hpc.observe.guard import NAME, describe_pause
from prime_hpc.observe.resumption import how_to_resume
from prime_hpc.observe.run_facts import RunFacts

Verdict = Literal["healthy", "complete", "failed", "unknown"]
NOTABLE = ("restart", "degrade", "recovered", "drain")
MAX_NOTES = 6
JOB_LAG_S = 30.0
"""When a job ends, its processes may fall this much before the scheduler's message."""
ASKED = re.compile(f"{NAME} asked: (.*)", re.S)
REASONS = ((re.compile(r"time.?limit|deadline", re.I), TIME_LIMIT), (re.compile("preempt", re.I), PREEMPTED))


class Diagnosis(msgspec.Struct, kw_only=True, frozen=True):
    """The answer. `process`, `component` and `rank` are whose failure came first, at epoch second `time`.

    `followed` are later failures, consequences of the first; `notes` are troubles that the run has survived.
    """

    run: str
    attempt: int
    verdict: Verdict
    headline: str
    cause: str | None = None
    process: str | None = None
    component: str | None = None
    rank: int | None = None
    time: float | None = None
    exit_code: int | None = None
    evidence: list[Evidence] = []
    remedy: str = ""
    followed: list[str] = []
    notes: list[str] = []

    @property
    def exit_status(self) -> int:
        """0: nothing is wrong; 1: a cause was found; 2: unknown."""
        return {"healthy": 0, "complete": 0, "failed": 1, "unknown": 2}[self.verdict]


def diagnose(facts: RunFacts) -> Diagnosis:
    """Say what became of an attempt, and why."""
    if not facts.attempts:
        return _answer(facts, "unknown", "the run was never started: there is only its plan")
    if facts.complete:
        return _of_complete(facts)
    findings = [f for failure in find_failures(facts) if not (f := examine(failure, facts)).says_nothing]
    if not findings and not facts.events and not facts.records:
        findings = examine_logs(facts)
    job = None if facts.live else find_job_end(facts)
    if job and (not findings or job.failure.time <= findings[0].failure.time + JOB_LAG_S):
        return _blamed(Blame(process=job.failure.process, cause=job.cause, finding=job, chain=[]), [], facts)
    if findings:
        return _blamed(find_first(findings, facts), findings, facts)
    return _of_live(facts) if facts.live else _of_ended(facts)


def _of_complete(facts: RunFacts) -> Diagnosis:
    """A run that did all it was to do, or that saved and left before, since it was asked to."""
    if facts.ending and facts.ending.drained:
        if found := ASKED.search(facts.ending.reason):
            evidence = [Evidence(EVENTS, facts.ending.line, facts.ending.reason[:MAX_TEXT])]
            return _verdict(facts, GUARD, {"what": found[1]}, evidence, None, facts.ending.time)
        headline = f"nothing is wrong: the run has left, {_progress(facts)}, {facts.ending.reason}"
        left = _answer(facts, "complete", headline)
        return msgspec.structs.replace(left, remedy=how_to_resume(facts.paths) if facts.newest else "")
    return _answer(facts, "complete", f"nothing is wrong: the run is complete, {_progress(facts)}")


def _of_live(facts: RunFacts) -> Diagnosis:
    """A run at work, in which no process has failed."""
    if beat := waits.overdue(facts) or waits.silent(facts):
        names = waits.chain(beat.process, facts)
        failure = Failure(process=beat.process, time=beat.wait.since if beat.wait else beat.time)
        finding = Finding(failure=failure, cause=HANG, groups={})
        return _blamed(Blame(process=names[-1], cause=HANG, finding=finding, chain=names), [], facts)
    held = f", paused, since {pause}" if (pause := describe_pause(facts.paths)) else ""
    return _of_pause(facts) or _answer(facts, "healthy", f"nothing is wrong: {_progress(facts)}{held}")


def _of_pause(facts: RunFacts) -> Diagnosis | None:
    """A run that waits for a source whose episodes fail or that the guard holds back, or was stopped when it did."""
    record = next((record for record in facts.records.values() if record.paused), None)
    if record is None:
        why = facts.changes.why
        evidence = [Evidence(facts.paths.live.name, None, why[:MAX_TEXT])]
        return _verdict(facts, GUARD, {"what": why}, evidence, None, facts.now) if why and facts.newest else None
    evidence = [Evidence(f"rendezvous/{record.process}.json", None, record.paused[:MAX_TEXT])]
    return _verdict(facts, ERROR_BUDGET, {"what": record.paused}, evidence, record.process, record.time)


def _of_ended(facts: RunFacts) -> Diagnosis:
    """An attempt that ended without the failure of a process."""
    ending = facts.ending
    if ending:
        cause = next((cause for pattern, cause in REASONS if pattern.search(ending.reason)), STOPPED)
        if cause is STOPPED and (pause := _of_pause(facts)):
            return pause
        evidence = [Evidence(EVENTS, ending.line, f"{ending.kind}: {ending.reason}")]
        return _verdict(facts, cause, {"reason": ending.reason or ending.kind}, evidence, None, ending.time)
    if facts.lease:
        evidence = [Evidence(f"rendezvous/{LEASE}", None, f"last beat {facts.now - facts.lease.beat:.0f} s ago")]
        evidence += find_text(SUPERVISOR_LOST, facts)
        return _verdict(facts, SUPERVISOR_LOST, {}, evidence, process=SUPERVISOR, time=facts.lease.beat)
    return _answer(facts, "unknown", f"the attempt ended without a failure that its files show, {_progress(facts)}")


def _blamed(blame: Blame, findings: list[Finding], facts: RunFacts) -> Diagnosis:
    failure = blame.finding.failure
    own = blame.process == failure.process
    return msgspec.structs.replace(
        _verdict(facts, blame.cause, blame.finding.groups, evidence_of(blame, facts), blame.process, failure.time),
        exit_code=failure.exit_code if own else None,
        followed=followers(blame, findings, facts),
    )


def _verdict(
    facts: RunFacts, cause: Cause, groups: dict[str, str], evidence: list[Evidence], process: str | None, time: float
) -> Diagnosis:
    run = str(facts.paths.root)
    fields = {"process": process or "", "run": run, **groups, "install": how_to_install(groups)}
    members = facts.members(process) if process else []
    return msgspec.structs.replace(
        _answer(facts, "unknown" if cause is UNCAUGHT else "failed", cause.says.format(**fields)),
        cause=cause.name,
        process=process,
        component=facts.component(members[0]) if members else None,
        rank=int(members[0].rpartition("-")[2]) if members == [process] else None,
        time=time,
        evidence=evidence,
        remedy=_remedy(cause.remedy.format(**fields), facts),
    )


def _answer(facts: RunFacts, verdict: Verdict, headline: str) -> Diagnosis:
    notes = [_note(event) for event in facts.events if event.kind in NOTABLE][-MAX_NOTES:]
    notes += [f"warning: {warning}" for warning in facts.warnings]
    return Diagnosis(run=facts.plan.name, attempt=facts.attempt, verdict=verdict, headline=headline, notes=notes)


def _remedy(advice: str, facts: RunFacts) -> str:
    """The advice, and how the run goes on after it."""
    if "prime_hpc." in advice or not facts.newest:
        return advice
    return f"{advice}; {how_to_resume(facts.paths)}"


def _progress(facts: RunFacts) -> str:
    """`step 12 of 90, last progress 3 s ago`, or how far the start has come."""
    if facts.serves and not facts.live:
        return "a fleet, which makes no steps"
    if not facts.steps and (figures := describe_evaluation(newest_evaluation(facts.metrics))):
        return f"evaluated {'; '.join(figures)}"
    if facts.steps:
        step, row = max(facts.steps.items())
        ago = f", last progress {facts.now - row['time']:.0f} s ago" if facts.live else ""
        return f"step {step} of {facts.max_steps}{ago}"
    waiting = [name for name in facts.processes if _state(name, facts) in ("waiting", "starting")]
    up = len(facts.processes) - len(waiting)
    names = f" (not yet: {', '.join(waiting[:5])}{', ...' if len(waiting) > 5 else ''})" if waiting else ""
    return f"{'' if facts.serves else 'no step yet, '}{up} of {len(facts.processes)} processes are up{names}"


def _state(name: str, facts: RunFacts) -> str:
    return facts.records[name].state if name in facts.records else "waiting"


def _note(event: Event) -> str:
    return f"{event.process or event.unit or 'run'}: {event.kind}{f' ({event.reason})' if event.reason else ''}"
