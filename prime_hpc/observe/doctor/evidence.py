"""Where the facts behind a diagnosis can be read: file, line and text."""

import re
from pathlib import Path

import msgspec

from prime_hpc.observe import waits
from prime_hpc.observe.doctor.blame import Blame
from prime_hpc.observe.doctor.cause import HANG, Cause
from prime_hpc.observe.doctor.failures import TAIL_BYTES, Finding, plain
from prime_hpc.observe.events import BEATS, EVENTS
from prime_hpc.observe.logs import LogFile
from prime_hpc.observe.run_facts import RunFacts

MAX_TEXT = 400
MAX_PROBLEMS = 8
"""Lines of a message after its first that are shown; a list of mistakes in a configuration is such a message."""
MAX_FOLLOWERS = 8


_ENDS_MESSAGE = re.compile(r"$|\S*\d\d:\d\d:\d\d|\(|\[|Traceback|The above|During handling|frame #|Exception raised"
                           r"|  File | +For further|Process \w+:")  # fmt: skip


class Evidence(msgspec.Struct, frozen=True):
    """A file, relative to the run directory, the line in it where there is one, and what it says."""

    file: str
    line: int | None
    text: str


def evidence_of(blame: Blame, facts: RunFacts) -> list[Evidence]:
    """What proves the blame: the telling line, the exit, the waits, and the memory of the machine."""
    finding = blame.finding
    found = [*_line(finding, facts), *_exit(finding, facts)]
    if len(blame.chain) > 1 or blame.cause is HANG:
        found += [e for name in blame.chain for e in _beat(name, facts)]
        if finding.log is None or blame.process != finding.failure.process:
            found += _last_words(blame.process, facts)
    if finding.failure.exit_code == -9:
        found += _memory(finding, facts)
    return found


def followers(blame: Blame, findings: list[Finding], facts: RunFacts) -> list[str]:
    """What failed after it, with the delay."""
    begin = blame.finding.failure.time
    told = {blame.process, blame.finding.failure.process}
    later = [f for f in findings if told.isdisjoint([f.failure.process, *facts.members(f.failure.process)])]
    texts = [f"{f.failure.process}: {f.cause.name}, {f.failure.time - begin:+.1f} s" for f in later]
    more = len(texts) - MAX_FOLLOWERS
    return texts[:MAX_FOLLOWERS] + ([f"and {more} more"] if more > 0 else [])


def find_text(cause: Cause, facts: RunFacts) -> list[Evidence]:
    """The first line in any log that speaks of `cause`."""
    for log in facts.logs:
        for line in log.lines(TAIL_BYTES):
            if cause.pattern and cause.pattern.search(line.text):
                return [log_evidence(log, line.number, line.text, facts)]
    return []


def log_evidence(log: LogFile, number: int | None, text: str, facts: RunFacts) -> Evidence:
    """A line of a log."""
    return Evidence(_relative(log.path, facts), number, text[:MAX_TEXT])


def _line(finding: Finding, facts: RunFacts) -> list[Evidence]:
    """The telling line with the list of problems that may follow it; without one, the error that was published."""
    if finding.log is None or finding.line is None:
        error = finding.failure.error
        path = facts.paths.rendezvous / f"{finding.failure.process}.json"
        return [Evidence(_relative(path, facts), None, error[:MAX_TEXT])] if error else []
    telling = finding.line.number
    evidence = [log_evidence(finding.log, telling, plain(finding.line.text), facts)]
    for line in (line for line in finding.log.lines(TAIL_BYTES) if telling < line.number <= telling + MAX_PROBLEMS):
        if _ENDS_MESSAGE.match(line.text):
            break
        evidence.append(log_evidence(finding.log, line.number, line.text.strip(), facts))
    return evidence


def _exit(finding: Finding, facts: RunFacts) -> list[Evidence]:
    event = finding.failure.event
    if event is None:
        return []
    code = "" if event.exit_code is None else f" with exit code {event.exit_code}"
    what = f"{event.process or event.unit}: {event.kind}{code}{f' ({event.reason})' if event.reason else ''}"
    kills = f"; the kernel killed {event.oom_kills} for want of memory" if event.oom_kills else ""
    return [Evidence(EVENTS, event.line, what + kills)]


def _beat(process: str, facts: RunFacts) -> list[Evidence]:
    beat = facts.beats.get(process)
    if beat is None:
        return []
    file = facts.paths.rendezvous / BEATS / f"{process}.json"
    return [Evidence(_relative(file, facts), None, waits.describe(beat, facts.now))]


def _last_words(process: str, facts: RunFacts) -> list[Evidence]:
    """The end of the log of a process that did not report anything."""
    logs = [log for log in facts.logs if log.process == process]
    lines = [line for line in logs[-1].lines(TAIL_BYTES) if line.text.strip()] if logs else []
    return [log_evidence(logs[-1], lines[-1].number, f"last line: {lines[-1].text}", facts)] if lines else []


def _memory(finding: Finding, facts: RunFacts) -> list[Evidence]:
    """The memory of the machine, where it is the one that the reader is on."""
    record, host = facts.records.get(finding.failure.process), facts.host
    if host is None or record is None or record.host != host.host:
        return []
    kills = "counts no kills" if host.oom_kills is None else f"counts {host.oom_kills} kills for want of memory"
    text = f"{host.host} has {host.total / 2**30:.1f} GiB of memory; the cgroup of this command {kills}"
    return [Evidence("/proc/meminfo", None, text)]


def _relative(path: Path, facts: RunFacts) -> str:
    return str(path.relative_to(facts.paths.root))
