"""A run that dies again and again trains every task that it drew, each once, and long ones as often as any other."""

import asyncio
import heapq
import logging
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from prime_hpc.config.env import SourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.orchestrator.journal import BatchCut, Journal, Memory
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.transport.messages import PolicyVersion, Rollout, RolloutDone
from tests.unit.test_scheduler import Clock, settle

GROUP, BATCH, STEPS, LIFE_S = 2, 8, 150, 8.0
"""A life lasts 8 median episodes, as a mean of exponential times."""
CRITICAL = 1.95
"""Of the Kolmogorov-Smirnov statistic times sqrt(n m / (n + m)): exceeded once in 1000 samples of one distribution."""


def length(task_index: int, member: int) -> float:
    """Seconds of a rollout: log-normal, a median of 1, one in a hundred above 33."""
    return random.Random(f"{task_index}/{member}").lognormvariate(0, 1.5)


class VirtualTime:
    """A runner whose rollouts take log-normal times by task; time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, str, asyncio.Future]] = []

    def pauses(self, source: str) -> bool:
        return False

    async def run(self, rollout_id: str, source: str, task_index: int, version: PolicyVersion) -> RolloutDone:
        seconds = length(task_index, int(rollout_id[-1]))
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._due, (self.now + seconds, rollout_id, future))
        await future
        rollout = Rollout(rollout_id=rollout_id, source=source, task_id=str(task_index), reward=1.0)
        return RolloutDone(worker="w", rollout=rollout)

    async def advance(self) -> None:
        """Until the next rollout ends."""
        self.now, _, future = heapq.heappop(self._due)
        future.set_result(None)
        await settle()


async def live(journal: Journal, clock: Clock, life_s: float, restores: bool) -> list[int]:
    """One life of an orchestrator, which ends after `life_s` in the middle of things, or with the last batch.

    Returns the tasks that its batches trained. Where it does not restore, open groups of the journal are forgotten.
    """
    config = RunConfig()
    config.orchestrator.group_size, config.orchestrator.batch_size = GROUP, BATCH
    config.orchestrator.max_inflight, config.orchestrator.max_staleness = 12, 1000
    runner, trained = VirtualTime(), list[int]()
    stream = TaskStream({"words": SourceConfig(id="words")}, {"words": 1000}, 0)
    stream.restore(journal.state)
    role = SimpleNamespace(config=config, log=logging.getLogger("test"))
    scheduler = Scheduler(role, runner, stream, clock, journal, lambda group: True)
    if restores:
        scheduler.restore(journal.state)
    running = asyncio.create_task(scheduler.run())
    await settle()
    while clock.shipped < STEPS and runner.now < life_s:
        if not scheduler.enough(clock.shipped + 1):
            await runner.advance()
            continue
        groups = scheduler.take(clock.shipped + 1)
        clock.shipped += 1
        clock.published = PolicyVersion(0, clock.shipped)
        journal.append(BatchCut(step=clock.shipped, lineage=0, group_ids=[g.group_id for g in groups], sample_ids=[],
                                memory=Memory(tasks=stream.state())))  # fmt: skip
        trained += [group.task_index for group in groups]
        await scheduler.notify()
        await settle()
    running.cancel()
    return trained


def lives(path: Path, life_s: float, restores: bool = True) -> tuple[list[int], Journal]:
    """Tasks that a run trained whose lives last `life_s` on average, and what its journal holds at the end."""

    async def scenario() -> tuple[list[int], Journal]:
        journal, clock, trained, generator = Journal.start(path), Clock(), list[int](), random.Random(0)
        while clock.shipped < STEPS:
            trained += await live(journal, clock, life_s * generator.expovariate(1.0), restores)
            journal.close()
            journal = Journal.reopen(path)
        return trained, journal

    return asyncio.run(scenario())


def distance(tasks: list[int], others: list[int]) -> float:
    """Kolmogorov-Smirnov statistic of two samples' lengths, times sqrt(n m / (n + m))."""
    a, b = (np.sort([length(task, i) for task in sample for i in range(GROUP)]) for sample in (tasks, others))
    points = np.concatenate([a, b])
    shares = [np.searchsorted(sample, points, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max() * np.sqrt(len(a) * len(b) / (len(a) + len(b))))


def test_nothing_that_was_drawn_is_lost_or_trained_twice_and_no_length_is_preferred(tmp_path: Path) -> None:
    trained, journal = lives(tmp_path / "interrupted", LIFE_S)
    waiting = [group.opened.task_index for group in journal.state.groups.values()]
    assert len(trained) == STEPS * BATCH // GROUP
    stream = TaskStream({"words": SourceConfig(id="words")}, {"words": 1000}, 0)
    drawn = [stream.draw(1)[2] for _ in range(journal.state.draws["words"])]
    assert sorted(trained + waiting) == sorted(drawn), "every task that was drawn, once"
    assert len(waiting) <= 12 + BATCH // GROUP, "and all but those of running rollouts and of a batch are trained"

    whole, _ = lives(tmp_path / "whole", math.inf)
    assert distance(trained, whole) < CRITICAL
    forgetful, _ = lives(tmp_path / "forgetful", LIFE_S, restores=False)
    assert distance(forgetful, whole) > CRITICAL, "a run that forgets what was open is found out"
