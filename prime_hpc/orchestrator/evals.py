"""Evaluation: every task of every evaluation source, under the version that serves when it starts."""

import asyncio
import time
from dataclasses import dataclass, field

from prime_hpc.cluster.role import Role
from prime_hpc.config.checks import source_name
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.report import Metrics, eval_metrics
from prime_hpc.orchestrator.runner import Runner
from prime_hpc.orchestrator.waiting import in_time
from prime_hpc.transport.messages import NOT_SAMPLED, PolicyVersion, Rollout, RolloutDone

DEFAULT_TASKS = 128
"""Tasks of an endless taskset without `num_tasks`."""


@dataclass
class Evaluation:
    """All sources together."""

    metrics: Metrics = field(default_factory=dict)
    rollouts: list[RolloutDone] = field(default_factory=list)


class Evaluator:
    """Runs the evaluation sources of a run."""

    def __init__(self, role: Role, runner: Runner, pool: EnvPool):
        self._role, self._settings = role, role.config.env.eval
        self._runner, self._pool = runner, pool
        self._log = role.log
        self._last = time.monotonic()

    def due(self, step: int, *, first: bool, last: bool) -> bool:
        """Whether version `step` is to be evaluated."""
        settings = self._settings
        if not settings.sources:
            return False
        regular = bool(settings.every) and step > 0 and step % settings.every == 0
        overdue = settings.every_s is not None and time.monotonic() - self._last >= settings.every_s
        return last or regular or overdue or (first and settings.at_start)

    async def run(self, version: PolicyVersion) -> Evaluation:
        """Evaluate all sources. The engines keep `version` meanwhile; rollouts of another version count as mixed."""
        evaluation = Evaluation()
        for source in self._settings.sources:
            name = source_name(source)
            known = self._pool.num_tasks[name]
            count = min(filter(None, (known, source.num_tasks)), default=DEFAULT_TASKS)
            done = await self._source(name, count, version)
            evaluation.rollouts += done
            evaluation.metrics |= self._measure(name, [each.rollout for each in done], version)
        self._last = time.monotonic()
        return evaluation

    def _measure(self, name: str, rollouts: list[Rollout], version: PolicyVersion) -> Metrics:
        if mixed := sum(not is_pure(rollout, version) for rollout in rollouts):
            self._log.error("%d rollouts of %s were not sampled by v%s alone", mixed, name, version)
        metrics = eval_metrics(name, rollouts)
        self._log.info("evaluated %s at v%s: reward %s", name, version, metrics.get(f"eval/{name}/reward"))
        return metrics | {f"eval/{name}/version": float(version.step), f"eval/{name}/mixed": float(mixed)}

    async def _source(self, name: str, tasks: int, version: PolicyVersion) -> list[RolloutDone]:
        """Every rollout of a source.

        Raises:
            DeadlineExceeded: none ended for as long as a batch may take.
        """
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._runner.run(f"eval-{version}-{name}-{i}-{k}", name, i, version, evaluate=True))
                for i in range(tasks)
                for k in range(self._settings.rollouts_per_task)
            ]
            for number, ended in enumerate(asyncio.as_completed(running), 1):
                await in_time(self._role, f"episode {number} of {len(running)} of {name}", f"env-{name}-0", ended)
        return [task.result() for task in running]


def is_pure(rollout: Rollout, version: PolicyVersion) -> bool:
    """Whether every sampled token of a rollout is of `version`."""
    allowed = {version.pack(), NOT_SAMPLED}
    return all(set(sample.versions.numpy().tolist()) <= allowed for sample in rollout.samples)
