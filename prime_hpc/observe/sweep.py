"""The results of a sweep: one row a point, from the run directories of a folder."""

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.cluster.paths import SWEEP
from prime_hpc.observe.ledger import read_ledger
from prime_hpc.observe.run_facts import RunFacts, read_run
from prime_hpc.observe.status import REWARD, take_status

WINDOW = 5
"""Steps that rewards are averaged over."""


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """One point. `state` is not started, queued, starting, running, complete, stopped or failed; `first`, `last` and
    `best` are means of the reward, in SFT of the loss (`measure`), over `WINDOW` steps in a row, None without any."""

    name: str
    overrides: list[str]
    state: str
    step: int = 0
    max_steps: int = 0
    measure: str = "reward"
    first: float | None = None
    last: float | None = None
    best: float | None = None
    gpu_hours: float = 0.0


def read_sweep(folder: Path) -> list[PointResult]:
    """Every point that the sweep has taken down, or where it has not, every run in `folder`."""
    record = read_json(folder / SWEEP)
    points = record["points"] if record else [
        {"name": name, "overrides": []} for name in sorted(list_fresh(folder)) if (folder / name / "plan.json").exists()
    ]  # fmt: skip
    return [_result(folder, point) for point in points]


def dead(rewards: list[float], steps: int) -> bool:
    """Whether the last `steps` rewards are all the same, so that nothing more can be learnt from them."""
    return len(rewards) >= steps and len(set(rewards[-steps:])) == 1


def rewards_of(facts: RunFacts) -> list[float]:
    """Mean reward of each step that has one."""
    return values_of(facts, REWARD)


def values_of(facts: RunFacts, name: str) -> list[float]:
    """A metric of each step that has it."""
    return [row[name] for row in facts.steps.values() if row.get(name) is not None]


def _result(folder: Path, point: dict[str, Any]) -> PointResult:
    run = folder / point["name"]
    if not (run / "plan.json").exists():
        return PointResult(**point, state="not started")
    facts = read_run(run)
    status, sft = take_status(facts), facts.plan.config.get("mode") == "sft"
    values = values_of(facts, "loss") if sft else rewards_of(facts)
    ends = range(min(WINDOW, len(values)), len(values) + 1) if values else ()
    means = [float(np.mean(values[max(0, end - WINDOW) : end])) for end in ends]
    first, last, best = (means[0], means[-1], (min if sft else max)(means)) if means else (None, None, None)
    return PointResult(
        **point,
        state=status.phase,
        step=status.step or 0,
        max_steps=status.max_steps or 0,
        measure="loss" if sft else "reward",
        first=first,
        last=last,
        best=best,
        gpu_hours=read_ledger(run, time.time()).gpu_hours,
    )
