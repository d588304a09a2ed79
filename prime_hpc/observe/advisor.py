"""From what a run measured to a better balance of engines, trainer and staleness, as overrides to paste."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from prime_hpc.cluster.files import list_fresh
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.checks import largest_group, own_group_size
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import gpus_per_replica
from prime_hpc.observe.monitor import Row, read_metrics
from prime_hpc.observe.records import SUFFIX, read_records
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.simulation import Outcome, Setting, Timings, simulate

STALENESS = (0, 1, 2, 4, 8)
COMPUTE = ("time/forward_backward", "time/optimizer")
WAITING = "time/wait_for_batch"
SETTLED = 2
"""Steps at the begin that are left out: compilation, first batches."""
RECORDS = 20
"""Files of rollout records that are read, the newest."""
WORTH = 0.05
"""Gain under which nothing is advised."""
FAITHFUL = 0.2
"""A simulation that misses the measured step by more than this share of it says nothing about other settings."""


@dataclass(frozen=True)
class Advice:
    """What was measured and simulated as it is, and the best other setting: its outcome and the overrides for it."""

    measured_step_s: float
    now: Outcome
    best: Outcome
    overrides: list[str]

    @property
    def error(self) -> float:
        """By which share of the measured step its simulation misses it, below 0 where that is too quick."""
        return self.now.step_s / self.measured_step_s - 1

    @property
    def faithful(self) -> bool:
        return abs(self.error) <= FAITHFUL

    @property
    def gain(self) -> float:
        """Share of a step's seconds that would be saved."""
        return 1 - self.best.step_s / self.now.step_s


def advise(run_dir: Path, plan: RunPlan) -> Advice | None:
    """The best split of the GPUs and bound on staleness; None where too little was measured to tell.

    There are no overrides where it is the run's own, or where the simulation is not `faithful`.
    """
    paths, config = RunPaths(run_dir), plan.typed_config()
    rows = [row for row in read_metrics(paths.metrics).values() if "time/step" in row][SETTLED:]
    timings = read_timings(paths, rows)
    if timings is None:
        return None
    measured_s, now = float(np.mean([row["time/step"] for row in rows])), simulate(setting_of(config), timings)
    if not (as_it_is := Advice(measured_s, now, now, [])).faithful:
        return as_it_is
    tried = [(simulate(setting, timings), overrides) for setting, overrides in alternatives(config, plan)]
    best, overrides = min([(now, []), *tried], key=lambda pair: pair[0].step_s)
    return as_it_is if best.step_s > (1 - WORTH) * now.step_s else Advice(measured_s, now, best, overrides)


def read_timings(paths: RunPaths, rows: list[Row]) -> Timings | None:
    """Durations from the metrics of settled steps and from rollout records; None without either."""
    groups = _rollout_seconds(paths)
    if len(rows) < 2 or not groups:
        return None
    compute = [sum(row[name] for name in COMPUTE) for row in rows]
    fixed = [row["time/step"] - row.get(WAITING, 0.0) - busy for row, busy in zip(rows, compute, strict=True)]
    pauses = [row["update/pause_s"] for row in rows if row.get("update/pause_s") is not None]
    return Timings(groups, compute, fixed, float(np.mean(pauses)) if pauses else 0.0)


def setting_of(config: RunConfig) -> Setting:
    """What the run was started with."""
    wanted = config.orchestrator
    return Setting(wanted.batch_size, _mean_group(config), wanted.inflight, wanted.max_staleness,
                   wanted.max_lead)  # fmt: skip


def _mean_group(config: RunConfig) -> int:
    """Rollouts of a group, where sources have groups of different sizes by their shares."""
    sizes = [own_group_size(config, source) for source in config.env.train]
    shares = [source.ratio for source in config.env.train]
    return round(np.average(sizes, weights=shares)) if sizes else config.orchestrator.group_size


def alternatives(config: RunConfig, plan: RunPlan) -> Iterator[tuple[Setting, list[str]]]:
    """Other bounds on staleness, and other splits of the same GPUs at the same load an engine."""
    base = setting_of(config)
    for bound in STALENESS:
        if bound > base.max_staleness:
            yield replace(base, max_staleness=bound), [f"orchestrator.max_staleness={bound}"]
    ranks, engines, each = len(plan.of("trainer")), len(plan.engines()), gpus_per_replica(config)
    if not engines or not any(p.gpus for p in plan.of("trainer")) or config.trainer.share_gpu:
        return
    total, node = ranks + engines * each, max(group.gpus for group in plan.groups) if plan.nodes > 2 else 1
    for count in range(1, (total - 1) // each + 1):
        left = total - count * each
        if count == engines or count * each % node or left % node:
            continue
        inflight = max(largest_group(config), base.max_inflight * count // engines)
        setting = replace(base, max_inflight=inflight, ranks=left / ranks)
        yield setting, [f"inference.replicas={count}", f"trainer.ranks={left}", f"orchestrator.max_inflight={inflight}",
                        *_nodes(config, count * each // node, left // node)]  # fmt: skip


def _nodes(config: RunConfig, engines: int, trainer: int) -> list[str]:
    """Numbers of nodes that were given have to be given anew."""
    given = config.cluster.components
    wanted = {"inference": (given.inference.nodes, engines), "trainer": (given.trainer.nodes, trainer)}
    return [f"cluster.components.{name}.nodes={count}" for name, (old, count) in wanted.items() if old]


def _rollout_seconds(paths: RunPaths) -> list[list[float]]:
    """Of the rollouts that ended well, group by group."""
    names = [name for name in list_fresh(paths.rollouts) if name.endswith(SUFFIX) and not name.startswith(".")]
    newest = sorted(names, key=lambda name: int(name.removeprefix("step_").removesuffix(SUFFIX)))[-RECORDS:]
    groups: dict[str, list[float]] = defaultdict(list)
    for record in chain.from_iterable(read_records(paths.rollouts / name) for name in newest):
        if record["failure"] is None:
            groups[record["rollout_id"].rpartition("-")[0]].append(record["seconds"])
    return list(groups.values())
