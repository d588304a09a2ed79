"""A run that dies again and again trains every task that it drew, the long ones too, and each once."""

import asyncio
import heapq
import logging
import random
from pathlib import Path
from types import SimpleNamespace

from prime_hpc.config.env import SourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.orchestrator.journal import BatchCut, Journal, Memory
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.transport.messages import PolicyVersion, Rollout, RolloutDone
from tests.unit.test_scheduler import Clock, settle

GROUP, BATCH, STEPS, STEPS_A_LIFE = 2, 8, 30, 4


class VirtualTime:
    """A runner whose rollouts take log-normal times by task; time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, str, asyncio.Future]] = []

    def pauses(self, source: str) -> bool:
        return False

    async def run(self, rollout_id: str, source: str, task_index: int, version: PolicyVersion) -> RolloutDone:
        seconds = random.Random(f"{task_index}/{rollout_id[-1]}").lognormvariate(0, 1.5)
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


async def live(journal: Journal, clock: Clock, until: int) -> list[int]:
    """One life of an orchestrator, up to batch `until`; returns the tasks that its batches trained."""
    config = RunConfig()
    config.orchestrator.group_size, config.orchestrator.batch_size = GROUP, BATCH
    config.orchestrator.max_inflight, config.orchestrator.max_staleness = 12, 1000
    runner, trained = VirtualTime(), list[int]()
    stream = TaskStream({"words": SourceConfig(id="words")}, {"words": 1000}, 0)
    stream.restore(journal.state)
    role = SimpleNamespace(config=config, log=logging.getLogger("test"))
    scheduler = Scheduler(role, runner, stream, clock, journal, lambda group: True)
    scheduler.restore(journal.state)
    running = asyncio.create_task(scheduler.run())
    await settle()
    while clock.shipped < until:
        while not scheduler.enough(clock.shipped + 1):
            await runner.advance()
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


def test_nothing_that_was_drawn_is_lost_or_trained_twice_however_long_it_takes(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[int], Journal]:
        path, clock, trained = tmp_path / "journal", Clock(), list[int]()
        journal = Journal.start(path)
        while clock.shipped < STEPS:
            trained += await live(journal, clock, min(STEPS, clock.shipped + STEPS_A_LIFE))
            journal.close()
            journal = Journal.reopen(path)
        return trained, journal

    trained, journal = asyncio.run(scenario())
    waiting = [group.opened.task_index for group in journal.state.groups.values()]
    assert len(trained) == STEPS * BATCH // GROUP
    stream = TaskStream({"words": SourceConfig(id="words")}, {"words": 1000}, 0)
    drawn = [stream.draw(1)[2] for _ in range(journal.state.draws["words"])]
    assert sorted(trained + waiting) == sorted(drawn), "every task that was drawn, once"
    assert len(waiting) <= 12 // GROUP + BATCH // GROUP, "and only the newest are not trained yet"
