"""What a run is doing right now, read from its directory alone."""

from dataclasses import dataclass, field
from typing import Any

from prime_hpc.cluster.files import read_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.observe.guard import describe_pause, read_warnings
from prime_hpc.plan.run_plan import ProcessPlan


@dataclass(frozen=True)
class Snapshot:
    """States of processes by name, what the orchestrator (in SFT: trainer rank 0) last said of its progress, why the
    run pauses, and which metrics are past their limits."""

    states: dict[str, str]
    progress: dict[str, Any] = field(default_factory=dict)
    paused: str = ""
    warnings: list[str] = field(default_factory=list)


def take_snapshot(paths: RunPaths, processes: list[ProcessPlan]) -> Snapshot:
    """The rendezvous records of `processes`; one that has not spoken yet is `waiting`."""
    records = {p.name: read_json(paths.rendezvous / f"{p.name}.json") for p in processes}
    states = {name: record["state"] if record else "waiting" for name, record in records.items()}
    speaker = records.get("orchestrator-0") or records.get("trainer-0") or {}
    paused = speaker.get("paused") or describe_pause(paths)
    return Snapshot(states, speaker.get("progress") or {}, paused, read_warnings(paths))
