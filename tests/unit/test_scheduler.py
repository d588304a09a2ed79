"""Credits, staleness and restoring of the scheduler, on a runner that a test controls."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

from prime_hpc.algorithms.staleness import Lineages
from prime_hpc.config.env import SourceConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.journal import Journal
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.transport.messages import Failure, PolicyVersion, Rollout, RolloutDone

GROUP = 4
WORDS: Mapping[str, int | None] = MappingProxyType({"words": None})


class Gate:
    """A runner whose rollouts end when the test lets them."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future] = {}
        self.pausing: set[str] = set()
        self.rewards = iter(lambda: 1.0, None)

    async def run(self, rollout_id: str, source: str, task_index: int, version: PolicyVersion) -> RolloutDone:
        future = self.running[rollout_id] = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            del self.running[rollout_id]
        return RolloutDone(
            worker="w", rollout=Rollout(rollout_id=rollout_id, source=source, task_id="t", reward=next(self.rewards))
        )

    def pauses(self, source: str) -> bool:
        return source in self.pausing

    async def finish_all(self) -> None:
        for future in list(self.running.values()):
            future.set_result(None)
        await settle()


async def drain(gate: Gate) -> None:
    while gate.running:
        await gate.finish_all()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Clock:
    """Versions as a test sets them."""

    def __init__(self) -> None:
        self.published = self.served = PolicyVersion(0, 0)
        self.shipped = 0
        self.lineages = Lineages([])

    @property
    def lead(self) -> int:
        return self.shipped - self.published.step


def make(tmp_path: Path, gate: Gate, clock: Clock, journal: Journal | None = None,
         sources: Mapping[str, int | None] = WORDS, **settings: int) -> Scheduler:  # fmt: skip
    """`sources` gives the size of the groups of each."""
    config = RunConfig()
    config.env.train = [SourceConfig(id=name, group_size=size) for name, size in sources.items()]
    config.orchestrator.group_size, config.orchestrator.batch_size = GROUP, 8
    for key, value in settings.items():
        setattr(config.orchestrator, key, value)
    role = SimpleNamespace(config=config, log=logging.getLogger("test"))
    journal = journal or Journal.start(tmp_path / "journal")
    stream = TaskStream({source.id: source for source in config.env.train}, dict.fromkeys(sources, 100), 0)
    stream.restore(journal.state)
    return Scheduler(role, gate, stream, clock, journal, has_signal)


def has_signal(group: Group) -> bool:
    """What tests mean by it: no reward is -1."""
    return all(rollout.reward != -1 for rollout in group.scored)


async def started(scheduler: Scheduler) -> asyncio.Task:
    task = asyncio.create_task(scheduler.run())
    await settle()
    return task


async def stopped(scheduler: Scheduler, task: asyncio.Task) -> None:
    await scheduler.close()
    await asyncio.wait_for(task, 5)


def test_a_waiting_batch_stops_new_groups(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        scheduler = make(tmp_path, gate, clock)
        task = await started(scheduler)
        assert len(gate.running) == 8, "max_inflight defaults to batch_size"
        await gate.finish_all()
        assert (scheduler.ready_rollouts, len(gate.running)) == (8, 8), "places are filled the moment they are free"
        await gate.finish_all()
        assert (scheduler.ready_rollouts, len(gate.running)) == (16, 0), "a batch waits: nothing new opens"
        del scheduler.ready[:]
        clock.shipped = 1
        await scheduler.notify()
        await settle()
        assert len(gate.running) == 8, "sampling goes on while batch 1 trains"
        await drain(gate)
        del scheduler.ready[:]
        clock.shipped = 2
        await scheduler.notify()
        await settle()
        assert not gate.running, "two batches shipped and untrained: no credit left"
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_without_staleness_sampling_waits_for_the_trainer(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        scheduler = make(tmp_path, gate, clock, max_staleness=0, max_inflight=100)
        task = await started(scheduler)
        assert len(gate.running) == 8, "exactly one batch may be sampled ahead"
        await gate.finish_all()
        assert (scheduler.ready_rollouts, len(gate.running)) == (8, 0)
        del scheduler.ready[:]
        clock.shipped = 1
        await scheduler.notify()
        await settle()
        assert not gate.running
        clock.published = clock.served = PolicyVersion(0, 1)
        await scheduler.notify()
        await settle()
        assert len(gate.running) == 8
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_hopeless_groups_are_cancelled_running_or_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        scheduler = make(tmp_path, gate, clock)
        task = await started(scheduler)
        for rollout_id in list(gate.running)[:GROUP]:
            gate.running[rollout_id].set_result(None)
        await settle()
        assert (len(scheduler.ready), len(scheduler.open)) == (1, 2)
        clock.served = PolicyVersion(0, 5)
        assert scheduler.cancel_where(lambda group: group.version.step < 5, "stale") == 3 * GROUP
        await scheduler.notify()
        await settle()
        assert {g.version.step for g in scheduler.open.values()} == {5}
        assert not scheduler.ready and len(scheduler.given_up["stale"]) == 3 * GROUP
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_restored_groups_run_what_is_missing_under_the_same_task(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        scheduler = make(tmp_path, gate, clock)
        task = await started(scheduler)
        begun = list(gate.running)
        for rollout_id in [*begun[:GROUP], begun[GROUP + 2]]:
            gate.running[rollout_id].set_result(None)
        await settle()
        journal = scheduler._journal
        tasks = {g.group_id: g.task_index for g in [*scheduler.ready, *scheduler.open.values()]}
        offset = journal.offset
        await stopped(scheduler, task)

        journal = Journal.reopen(tmp_path / "journal", 0, offset, rewind=True)
        gate, again = Gate(), None
        again = make(tmp_path, gate, clock, journal)
        again.restore(journal.state)
        assert again.ready_rollouts == GROUP
        unstarted = next(group for group in again.open.values() if not group.done)
        assert again.cancel_where(lambda group: group is unstarted, "lineage") == GROUP, "before anything runs"
        del tasks[unstarted.group_id]
        task = await started(again)
        held = {g.group_id: g.task_index for g in [*again.ready, *again.open.values()]}
        assert held.items() > tasks.items() and unstarted.group_id not in held, "another one was drawn in its place"
        partial = next(g for g in again.open.values() if g.done)
        missing = [r for r in gate.running if r.startswith(partial.group_id)]
        assert missing == [r for r in begun[GROUP : 2 * GROUP] if r != begun[GROUP + 2]], "whichever have not ended"
        await stopped(again, task)

    asyncio.run(scenario())


def test_groups_without_a_signal_make_room_for_others_and_come_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        gate.rewards = iter([-1.0] * GROUP + [1.0] * 100)
        scheduler = make(tmp_path, gate, clock, max_inflight=4)
        task = await started(scheduler)
        await gate.finish_all()
        await gate.finish_all()
        assert (len(scheduler.ready), scheduler.ready_rollouts, scheduler.enough(1)) == (2, 4, False)
        await gate.finish_all()
        assert scheduler.enough(1)
        taken = scheduler.take(1)
        assert [g.informative for g in taken] == [False, True, True] and not scheduler.ready
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_a_batch_is_cut_as_it_is_when_too_much_came_to_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        gate.rewards = iter([-1.0] * 100)
        scheduler = make(tmp_path, gate, clock, max_empty_batches=2)
        task = await started(scheduler)
        await gate.finish_all()
        assert not scheduler.enough(1)
        await gate.finish_all()
        assert scheduler.enough(1) and len(scheduler.take(1)) == 4
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_waiting_for_the_old_cuts_no_batch_before_they_have_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        clock.shipped, clock.published, clock.served = 2, PolicyVersion(0, 2), PolicyVersion(0, 0)
        scheduler = make(tmp_path, gate, clock, max_staleness=2, max_inflight=12)
        scheduler._settings.on_stale = "wait"
        task = await started(scheduler)
        clock.served = PolicyVersion(0, 2)
        slow = list(gate.running)[:GROUP]
        for rollout_id in list(gate.running)[GROUP:]:
            gate.running[rollout_id].set_result(None)
        await settle()
        assert scheduler.ready_rollouts == 8
        assert not scheduler.enough(3), "batch 3 would leave version 0 behind"
        scheduler._settings.on_stale = "drop"
        assert scheduler.enough(3)
        scheduler._settings.on_stale = "wait"
        for rollout_id in slow:
            gate.running[rollout_id].set_result(None)
        await settle()
        assert scheduler.enough(3) and len(scheduler.take(3)) == 3, "and whoever is as old comes along"
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_a_group_with_a_failure_may_be_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        scheduler = make(tmp_path, gate, clock, max_inflight=4)
        scheduler._settings.partial_groups = "drop"
        task = await started(scheduler)
        group = next(iter(scheduler.open.values()))
        failure = Failure(kind="environment", type="KeyError", message="answer")
        group.done.append(RolloutDone(worker="w", rollout=Rollout(rollout_id="x", source="words", task_id="t",
                                                                  failure=failure)))  # fmt: skip
        await gate.finish_all()
        assert not scheduler.ready
        assert Journal.reopen(tmp_path / "journal").state.fates == {"partial": 1}
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_a_source_that_pauses_has_one_group_open_to_be_tried(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        gate.pausing = {"words"}
        scheduler = make(tmp_path, gate, clock)
        task = await started(scheduler)
        assert len(gate.running) == GROUP
        gate.pausing = set()
        await scheduler.notify()
        await settle()
        assert len(gate.running) == 2 * GROUP
        await stopped(scheduler, task)

    asyncio.run(scenario())


SIZES = {"words": None, "sums": 6}
"""A size that does not divide what one batch of the other leaves."""


def test_sources_have_groups_of_their_own_size(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        scheduler = make(tmp_path, gate, clock, sources=SIZES, batch_size=12, max_inflight=100, max_staleness=0)
        task = await started(scheduler)
        assert sorted((g.source, g.size) for g in scheduler.open.values()) == [("sums", 6), ("words", 4), ("words", 4)]
        assert len(gate.running) == 14, "a batch without staleness is full, if with more than it needs"
        await gate.finish_all()
        assert scheduler.enough(1)
        assert [len(g.done) == g.size for g in scheduler.take(1)] == [True] * 3
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_groups_of_any_size_wait_for_room_for_the_largest(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        scheduler = make(tmp_path, gate, clock, sources=SIZES, batch_size=12, max_inflight=12)
        assert scheduler.throttle.limit >= 6
        task = await started(scheduler)
        assert len(gate.running) == 10, "6 more might not fit"
        await stopped(scheduler, task)

    asyncio.run(scenario())


def test_a_restored_group_keeps_the_size_of_its_source(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, clock = Gate(), Clock()
        scheduler = make(tmp_path, gate, clock, sources=SIZES, batch_size=12, max_inflight=12)
        task = await started(scheduler)
        ended = [next(r for r in gate.running if r.startswith(g)) for g in scheduler.open]
        for rollout_id in ended:
            gate.running[rollout_id].set_result(None)
        await settle()
        task.cancel()
        await asyncio.wait([task])
        journal = Journal.reopen(tmp_path / "journal")
        again = make(tmp_path, Gate(), clock, journal, sources=SIZES, batch_size=12, max_inflight=12)
        again.restore(journal.state)
        sizes = {(g.source, g.size, len(g.done)) for g in again.open.values()}
        assert sizes == {("words", 4, 1), ("sums", 6, 1)}

    asyncio.run(scenario())
