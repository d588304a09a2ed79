"""Evaluation: every task of a source, from the version on that serves when it starts, beside the training."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prime_hpc.cluster.role import Role
from prime_hpc.config.checks import source_name
from prime_hpc.config.env import EvalSourceConfig
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.report import Metrics, eval_metrics
from prime_hpc.orchestrator.runner import Runner
from prime_hpc.orchestrator.waiting import within
from prime_hpc.transport.messages import NOT_SAMPLED, PolicyVersion, Rollout, RolloutDone

DEFAULT_TASKS = 128
"""Tasks of an endless taskset without `num_tasks`."""


@dataclass(frozen=True)
class Evaluation:
    """Of one source, after `step`."""

    source: str
    step: int
    rollouts: list[RolloutDone]
    metrics: Metrics


Record = Callable[[Evaluation], Awaitable[None]]


class _Running(NamedTuple):
    """An evaluation that is not over."""

    source: str
    version: PolicyVersion


class Evaluator:
    """Runs the evaluations of a run, each source by itself, in `tasks`."""

    def __init__(self, role: Role, runner: Runner, pool: EnvPool, tasks: asyncio.TaskGroup, record: Record,
                 evaluated: Mapping[str, int]):  # fmt: skip
        """`evaluated` is the last step with figures of each source; `record` takes down what is new."""
        self._role, self._settings = role, role.config.env.eval
        self._sources: dict[str, EvalSourceConfig] = {source_name(s): s for s in self._settings.sources}
        self._runner, self._pool, self._tasks, self._record = runner, pool, tasks, record
        self._evaluated = dict(evaluated)
        self._ended = dict.fromkeys(self._sources, time.monotonic())
        self._running: dict[asyncio.Task[None], _Running] = {}
        self._closed = False
        env = role.config.env
        self._patience_s = (env.retries + 1) * env.rollout_timeout_s + role.config.trainer.batch_timeout_s
        """An episode may be played several times."""

    def due(self, step: int) -> list[str]:
        """Sources to evaluate after `step`, by steps or by time. One whose last evaluation still runs is left out."""
        return [name for name in self._sources if self._is_due(name, step)]

    def owed(self, step: int) -> list[str]:
        """Sources that lack their last evaluation up to `step`: at the start, and where a restart cut it off."""
        return [name for name in self._sources if self._evaluated.get(name, -1) < self._last_due(name, step)]

    def missing(self, step: int) -> list[str]:
        """Sources without figures after `step`."""
        return [name for name in self._sources if self._evaluated.get(name, -1) < step]

    def start(self, step: int, version: PolicyVersion, sources: Iterable[str]) -> None:
        """Evaluate `sources` side by side from now on; nothing after `close`."""
        for name in () if self._closed else sources:
            task = self._tasks.create_task(self._evaluate(name, step, version))
            self._running[task] = _Running(name, version)
            task.add_done_callback(self._running.pop)

    async def hold(self, version: PolicyVersion) -> None:
        """Return once what began at `version` is over, after `env.eval.hold_s` at the latest."""
        tasks = [task for task, running in self._running.items() if running.version == version]
        if not tasks or not self._settings.hold_s:
            return
        _, late = await self._wait(tasks, f"evaluations at v{version}", self._settings.hold_s)
        for running in (self._running[task] for task in late):
            self._role.log.warning("the evaluation of %s at v%s goes on under newer versions, since it has held up "
                                   "updates for %g s (env.eval.hold_s)", *running, self._settings.hold_s)  # fmt: skip

    async def finish(self) -> None:
        """Return once nothing is evaluated any more."""
        while self._running:
            await self._wait(list(self._running), "the last evaluations", self._patience_s)

    def close(self) -> None:
        """Give up what runs, and start nothing more."""
        self._closed = True
        self.cancel_where(lambda _: True, "the run leaves; what is due at a step is repeated when it goes on")

    def cancel_where(self, hopeless: Callable[[PolicyVersion], bool], why: str) -> None:
        """Give up evaluations that began at such a version."""
        for task, running in self._running.items():
            if hopeless(running.version):
                self._role.log.warning("the evaluation of %s at v%s is given up: %s", *running, why)
                task.cancel()

    async def _wait(self, tasks: list[asyncio.Task[None]], what: str, timeout_s: float) -> tuple[set, set]:
        """Those that are done and those that are not, once all are, or after `timeout_s`."""
        owner = f"env-{self._running[tasks[0]].source}-0"
        with self._role.heart.waiting(what, owner, timeout_s):
            return await asyncio.wait(tasks, timeout=timeout_s)

    def _every(self, name: str) -> int:
        own = self._sources[name].every
        return self._settings.every if own is None else own

    def _is_due(self, name: str, step: int) -> bool:
        every, every_s = self._every(name), self._settings.every_s
        regular = bool(every) and step > 0 and step % every == 0
        overdue = every_s is not None and time.monotonic() - self._ended[name] >= every_s
        before = next((running for running in self._running.values() if running.source == name), None)
        if regular and before:
            self._role.log.warning("%s is not evaluated after step %d, as its evaluation at v%s still runs", name, step,
                                   before.version)  # fmt: skip
        return (regular or overdue) and not before

    def _last_due(self, name: str, step: int) -> int:
        """The last step up to `step` after which a source is to be evaluated; -1 where there is none."""
        every = self._every(name)
        last = step - step % every if every else 0
        return last if last or (step == 0 and self._settings.at_start) else -1

    async def _evaluate(self, name: str, step: int, version: PolicyVersion) -> None:
        self._role.reach("evaluation.before")
        done = await self._episodes(name, version)
        metrics = self._measure(name, [each.rollout for each in done], version)
        await self._record(Evaluation(name, step, done, metrics))
        self._evaluated[name], self._ended[name] = step, time.monotonic()
        self._role.reach("evaluation.after")

    def _measure(self, name: str, rollouts: list[Rollout], version: PolicyVersion) -> Metrics:
        metrics = eval_metrics(name, rollouts)
        served = served_by(rollouts, version)
        told = f"; {served}" if served.mixed else ""
        self._role.log.info("evaluated %s at v%s: reward %s%s", name, version, metrics.get(f"eval/{name}/reward"), told)
        return metrics | {f"eval/{name}/{key}": value for key, value in served.metrics().items()}

    async def _episodes(self, name: str, version: PolicyVersion) -> list[RolloutDone]:
        """Every rollout of a source.

        Raises:
            DeadlineExceeded: none ended for as long as one may take.
        """
        source = self._sources[name]
        count = min(filter(None, (self._pool.num_tasks[name], source.num_tasks)), default=DEFAULT_TASKS)
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._runner.run(f"eval-{version}-{name}-{i}-{k}", name, i, version, evaluate=True))
                for i in range(count)
                for k in range(source.rollouts_per_task or self._settings.rollouts_per_task)
            ]
            for number, ended in enumerate(asyncio.as_completed(running), 1):
                what = f"episode {number} of {len(running)} of {name}"
                await within(self._patience_s, self._role, what, f"env-{name}-0", ended)
        return [task.result() for task in running]


class Served(NamedTuple):
    """Which versions sampled an evaluation: the one that it began at, rollouts with a token of another, the least and
    the greatest, and the share of the tokens that are of the first one; None where no token was sampled."""

    version: PolicyVersion
    mixed: int
    least: PolicyVersion | None = None
    greatest: PolicyVersion | None = None
    share: float | None = None

    def __str__(self) -> str:
        alone = self.least == self.greatest
        return (
            f"sampled by v{self.least}{'' if alone else f' to v{self.greatest}'}, {self.share:.0%} by v{self.version}"
        )

    def metrics(self) -> Metrics:
        """By the names of docs/metrics.md, below the source's."""
        always = {"version": float(self.version.step), "mixed": float(self.mixed)}
        if self.least is None or self.greatest is None or self.share is None:
            return always
        return always | {"version/min": float(self.least.step), "version/max": float(self.greatest.step),
                         "version/share": self.share}  # fmt: skip


def served_by(rollouts: Iterable[Rollout], version: PolicyVersion) -> Served:
    """The account of an evaluation that began at `version`."""
    played = [np.concatenate([_NO_TOKEN, *(sample.versions.numpy() for sample in r.samples)]) for r in rollouts]
    sampled = [versions[versions != NOT_SAMPLED] for versions in played]
    mixed = sum(bool((versions != version.pack()).any()) for versions in sampled)
    tokens = np.concatenate([_NO_TOKEN, *sampled])
    if not len(tokens):
        return Served(version, mixed)
    least, greatest = (PolicyVersion.unpack(int(packed)) for packed in (tokens.min(), tokens.max()))
    return Served(version, mixed, least, greatest, float((tokens == version.pack()).mean()))


_NO_TOKEN = np.empty(0, np.int64)
