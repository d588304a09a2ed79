"""How far a run is, and what each of its processes is doing: what `status` shows."""

from typing import Any

import msgspec

from prime_hpc.cluster.files import read_json
from prime_hpc.observe.doctor import diagnose
from prime_hpc.observe.evaluation import describe_evaluation, newest_evaluation
from prime_hpc.observe.guard import describe_pause
from prime_hpc.observe.run_facts import RunFacts

ENDED = ("complete", "stopped", "failed")
"""Phases of a run that is no longer at work."""
LAST_WORDS = ("done", "failed", "stopped")
"""States that a process leaves behind; any other it had when it was ended."""
REWARD = "train/all/reward"
TRAINED = "perf/tokens_per_s"
SAMPLED = "perf/rollout_tokens_per_s"


class WaitStatus(msgspec.Struct, kw_only=True, frozen=True):
    """A wait: for `what` from `owner`, for so many seconds of at most `deadline_s`."""

    what: str
    owner: str
    seconds: float
    deadline_s: float


class ProcessStatus(msgspec.Struct, kw_only=True, frozen=True):
    """One process: its state, starts within the attempt after the first, what it does, and what it waits for."""

    name: str
    component: str
    state: str
    restarts: int
    doing: str
    wait: WaitStatus | None


class RunStatus(msgspec.Struct, kw_only=True, frozen=True):
    """A run at one moment. Throughputs are tokens a second over the last step; None where nothing was measured yet.
    `started_from` is the checkpoint of another run that it began from; `paused` says why it pauses, or did when it was
    stopped; `warnings` are metrics past their limits; `evaluated` has a line for each source, the last time.

    `phase` is not started, queued, starting, running or serving, or one of `ENDED`; `why` says who or what ended a run
    before its last step. A fleet makes no steps. `startup_s` has the milestones up to the attempt's first step, in
    seconds since its job, or it itself, began.
    """

    run: str
    attempt: int
    phase: str
    why: str
    started_from: str
    paused: str
    warnings: list[str]
    step: int | None
    max_steps: int | None
    progress_age_s: float | None
    reward: float | None
    trained_tokens_per_s: float | None
    sampled_tokens_per_s: float | None
    startup_s: dict[str, float]
    evaluated: list[str]
    processes: list[ProcessStatus]


def take_status(facts: RunFacts) -> RunStatus:
    """The status of an attempt."""
    step, row = max(facts.steps.items(), default=(0, {}))
    phase = _phase(facts)
    return RunStatus(
        run=facts.plan.name,
        attempt=facts.attempt,
        phase=phase,
        why=_why(facts, phase, step),
        started_from=_origin(facts),
        paused=_pause(facts, phase),
        warnings=facts.warnings,
        step=None if facts.serves else step,
        max_steps=None if facts.serves else facts.max_steps,
        progress_age_s=facts.now - row["time"] if row and phase not in ENDED else None,
        reward=_newest(facts.steps, REWARD),
        trained_tokens_per_s=row.get(TRAINED),
        sampled_tokens_per_s=row.get(SAMPLED),
        startup_s=(read_json(facts.paths.startup) or {}).get("seconds", {}) if facts.newest else {},
        evaluated=describe_evaluation(newest_evaluation(facts.metrics)),
        processes=[_process(name, facts, ended=phase in ENDED) for name in facts.processes],
    )


def _pause(facts: RunFacts, phase: str) -> str:
    by_itself = next((record.paused for record in facts.records.values() if record.paused), "")
    return by_itself or ("" if phase in ENDED else describe_pause(facts.paths))


def _origin(facts: RunFacts) -> str:
    start = facts.plan.typed_config().start_from
    return start.words if start.path else ""


def _phase(facts: RunFacts) -> str:
    ending = facts.ending
    if ending and ending.kind != "stop":
        return "complete" if ending.kind == "complete" and not ending.drained else "stopped"
    if facts.complete:
        return "complete"
    if facts.live and facts.serves:
        states = [_state(name, facts) for name in facts.processes]
        return "serving" if all(state == "ready" for state in states) else "starting"
    if facts.live:
        return "running" if facts.steps or _samples(facts) else "starting"
    if not facts.attempts:
        return "not started"
    return "queued" if not facts.events and facts.paths.job.exists() else "failed"


def _samples(facts: RunFacts) -> bool:
    """Whether a run without a trainer, which need not make a step, is at work."""
    return facts.plan.config.get("mode") == "sample" and _state("orchestrator-0", facts) in ("sampling", "paused")


def _why(facts: RunFacts, phase: str, step: int) -> str:
    """Who stopped a run, what it failed of, or which rule ended it before its last step."""
    if phase == "failed":
        found = diagnose(facts)
        return found.headline.partition("\n")[0] if found.cause else "it ended without a word"
    if phase == "stopped" and facts.ending:
        return facts.ending.reason
    if phase == "complete" and facts.plan.config.get("mode") == "sft" and step < facts.max_steps:
        return "trainer.sft.probe.stop_at reached"
    return ""


def _process(name: str, facts: RunFacts, *, ended: bool) -> ProcessStatus:
    beat = facts.beats.get(name) if not ended else None
    wait = beat.wait if beat else None
    return ProcessStatus(
        name=name,
        component=facts.component(name),
        state=_last_state(name, facts) if ended else _state(name, facts),
        restarts=max((log.restart for log in facts.logs if log.process == name), default=0),
        doing=beat.doing if beat else "",
        wait=WaitStatus(what=wait.what, owner=wait.owner, seconds=facts.now - wait.since, deadline_s=wait.deadline_s)
        if wait
        else None,
    )


def _last_state(name: str, facts: RunFacts) -> str:
    """How a process of a run that is over ended; one that had not by itself was stopped with the run."""
    state = _state(name, facts)
    if state == "waiting":
        return "not started"
    return state if state in LAST_WORDS or state.startswith("exit") else "stopped"


def _state(name: str, facts: RunFacts) -> str:
    """What a process last said of itself, unless it has ended since."""
    record = facts.records.get(name)
    exits = [
        e for e in facts.events if (e.process, e.kind) == (name, "exit") and e.time >= (record.time if record else 0)
    ]
    if exits and exits[-1].exit_code != 0:
        return f"exit {exits[-1].exit_code}"
    return record.state if record else "waiting"


def _newest(steps: dict[int, dict[str, Any]], name: str) -> float | None:
    """The last value that is there; a reward may be missing where every rollout of a batch failed."""
    return next((row[name] for _, row in sorted(steps.items(), reverse=True) if row.get(name) is not None), None)
