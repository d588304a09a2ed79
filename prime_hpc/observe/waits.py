"""Who waits for whom: from a process along its wait to the one that waits for nobody."""

from prime_hpc.observe.events import Beat
from prime_hpc.observe.run_facts import RunFacts

GRACE_S = 10.0
"""A wait that ran past its deadline by less than this is about to end by itself."""


def chain(process: str, facts: RunFacts) -> list[str]:
    """The process, the one that it waits for, and so on; the last waits for nobody, is unknown or closes a circle."""
    names = [process]
    while (beat := facts.beats.get(names[-1])) and beat.wait:
        names.append(beat.wait.owner)
        if names.count(names[-1]) > 1:
            break
    return names


def overdue(facts: RunFacts) -> Beat | None:
    """The wait that has been past its deadline for longest."""
    late = [beat for beat in facts.beats.values() if beat.wait and _lateness(beat, facts.now) > GRACE_S]
    return max(late, key=lambda beat: _lateness(beat, facts.now), default=None)


def silent(facts: RunFacts) -> Beat | None:
    """The process that has been without a sign of life for longest, although it has not ended."""
    ended = {name for name, record in facts.records.items() if record.state in ("done", "failed", "stopped")}
    quiet = [b for b in facts.beats.values() if facts.now - b.time > facts.hang_s and b.process not in ended]
    return min(quiet, key=lambda beat: beat.time, default=None)


def describe(beat: Beat, now: float) -> str:
    """What a process does or waits for, in words."""
    if beat.wait is None:
        doing = beat.doing or "at work"
        return f"{beat.process} waits for nobody; it was last seen {now - beat.time:.0f} s ago, {doing}"
    wait = beat.wait
    return (f"{beat.process} has waited {now - wait.since:.0f} s for {wait.what} from {wait.owner} "
            f"(deadline {wait.deadline_s:.0f} s)")  # fmt: skip


def _lateness(beat: Beat, now: float) -> float:
    return now - beat.wait.since - beat.wait.deadline_s if beat.wait else 0.0
