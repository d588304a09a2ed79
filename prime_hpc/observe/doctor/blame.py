"""Which of many failures came first: symptoms point at other processes, waits lead to the one that waits for none."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from prime_hpc.observe import waits
from prime_hpc.observe.doctor.cause import (
    COLLECTIVE_STUCK,
    COLLECTIVE_TIMEOUT,
    HANG,
    PEER_LOST,
    SUPERVISOR_LOST,
    UNCAUGHT,
    Cause,
)
from prime_hpc.observe.doctor.failures import TAIL_BYTES, Finding
from prime_hpc.observe.run_facts import RunFacts

SLACK_S = 60.0
"""A process may take this long from its failure to its last word, while others have fallen already."""
UNKNOWN_LAG_S = 5.0
"""An error that nobody knows is rather the consequence of a known one that came this little later."""
SUPERVISOR = "supervisor"

_ENQUEUED = re.compile(r"last enqueued NCCL work: (\d+)")


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Who is to blame, for what, and the finding that says so; `chain` is who waited for whom, up to that process."""

    process: str
    cause: Cause
    finding: Finding
    chain: list[str]


def find_first(findings: list[Finding], facts: RunFacts) -> Blame:
    """The first failure of an attempt; `findings` are in order of time and not empty."""
    limit = findings[0].failure.time + SLACK_S
    roots = [finding for finding in findings if not finding.cause.symptom and finding.failure.time <= limit]
    if not roots:
        return _follow(findings, facts)
    root = min(roots, key=_moment)
    names = waits.chain(_idle(root.failure.process, facts), facts) if root.cause is HANG else [root.failure.process]
    return Blame(process=names[-1], cause=root.cause, finding=root, chain=names)


def _moment(finding: Finding) -> float:
    return finding.failure.time + (UNKNOWN_LAG_S if finding.cause is UNCAUGHT else 0.0)


def _idle(unit: str, facts: RunFacts) -> str:
    """The process of a hung unit that does not wait for another, else its first; the unit where nothing is known."""
    members = facts.members(unit)
    free = [name for name in members if name in facts.beats and facts.beats[name].wait is None]
    return next(iter(free + members), unit)


def _follow(symptoms: list[Finding], facts: RunFacts) -> Blame:
    """From the first symptom to the process that it points at, and on while that one points at another."""
    by_process = {finding.failure.process: finding for finding in symptoms}
    finding, names = symptoms[0], [symptoms[0].failure.process]
    while (following := _points_at(finding, symptoms, facts)) and following not in names:
        names.append(following)
        if following not in by_process:
            names += [name for name in waits.chain(following, facts)[1:] if name not in names]
            break
        finding = by_process[following]
    cause = finding.cause
    if cause is COLLECTIVE_TIMEOUT and names[-1] == finding.failure.process:
        cause = COLLECTIVE_STUCK
    return Blame(process=names[-1], cause=cause, finding=finding, chain=names)


def _points_at(finding: Finding, symptoms: list[Finding], facts: RunFacts) -> str | None:
    if finding.cause is SUPERVISOR_LOST:
        return SUPERVISOR
    if finding.cause in (COLLECTIVE_TIMEOUT, PEER_LOST):
        return _missing_rank(symptoms, facts)
    return finding.groups.get("owner")


def _missing_rank(symptoms: list[Finding], facts: RunFacts) -> str | None:
    """The trainer rank that complains of nobody; where all do, the one that had come to the fewest collectives."""
    witnesses = {f.failure.process: f for f in symptoms if f.cause in (COLLECTIVE_TIMEOUT, PEER_LOST)}
    ranks = [name for name in facts.processes if facts.component(name) == "trainer"]
    silent = [rank for rank in ranks if rank not in witnesses]
    if silent:
        return silent[0]
    reached = {name: _enqueued(finding) for name, finding in witnesses.items()}
    known = {name: count for name, count in reached.items() if count is not None}
    if len(set(known.values())) < 2:
        return None
    return min(known, key=lambda name: known[name])


def _enqueued(finding: Finding) -> int | None:
    """Collectives that a rank had enqueued, as NCCL's watchdog counts them."""
    lines: Iterable[str] = (line.text for line in finding.log.lines(TAIL_BYTES)) if finding.log else ()
    counts = [int(found[1]) for text in lines if (found := _ENQUEUED.search(text))]
    return counts[-1] if counts else None
