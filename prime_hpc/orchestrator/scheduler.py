"""Continuous sampling: opens groups while credits last, collects finished ones, cancels those that came too late."""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Callable

from prime_hpc.cluster.role import Role
from prime_hpc.config.checks import group_size, largest_group
from prime_hpc.orchestrator.concurrency import Throttle
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.journal import GroupOpened, GroupsDropped, Journal, JournalState, RolloutFinished
from prime_hpc.orchestrator.runner import Runner
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.orchestrator.versions import Versions


class Scheduler:
    """Holds the groups that run (`open`) and those that wait for a batch (`ready`)."""

    def __init__(self, role: Role, runner: Runner, stream: TaskStream, versions: Versions, journal: Journal,
                 informative: Callable[[Group], bool]):  # fmt: skip
        """`informative` says whether a finished group would train anything."""
        settings = role.config.orchestrator
        self._informative = informative
        self.ready: list[Group] = []
        self.open: dict[str, Group] = {}
        self.given_up: dict[str, list[float]] = defaultdict(list)
        """Of every rollout that was given up since anybody looked, by reason, the seconds since its group began."""
        self.closed = self.paused = False
        self._config, self._largest = role.config, largest_group(role.config)
        self.throttle = Throttle(settings.inflight, self._largest,
                                 (settings.max_staleness + 1) * settings.batch_size)  # fmt: skip
        self.completed = 0
        """Rollouts that ended without a failure."""
        self.changed = asyncio.Condition()
        self._settings = settings
        self._runner, self._stream, self._versions, self._journal = runner, stream, versions, journal
        self._tasks: dict[str, asyncio.Task] = {}

    @property
    def inflight(self) -> int:
        """Rollouts that run now."""
        return sum(g.size - len(g.done) for g in self.open.values())

    @property
    def limit(self) -> int:
        """Rollouts that may run at once."""
        return self.throttle.limit if self._settings.max_inflight == "auto" else self._settings.inflight

    @property
    def ready_rollouts(self) -> int:
        """Finished rollouts that count towards a batch: those of groups with something to learn from."""
        return sum(len(g.done) for g in self.ready if g.informative)

    def enough(self, step: int) -> bool:
        """Whether batch `step` may be cut."""
        size = self._settings.batch_size
        sampled = sum(len(g.done) for g in self.ready)
        if self.ready_rollouts < size and sampled < size * self._settings.max_empty_batches:
            return False
        return self._settings.on_stale == "drop" or not any(self._last_chance(g, step) for g in self.open.values())

    def take(self, step: int) -> list[Group]:
        """Groups of batch `step`, those of the oldest version first; groups without a signal come along as extras."""
        self.ready.sort(key=lambda group: group.version)
        taken, count = list[Group](), 0
        while self.ready and (count < self._settings.batch_size or self._urgent(self.ready[0], step)):
            group = self.ready.pop(0)
            taken.append(group)
            count += len(group.done) if group.informative else 0
        return taken

    def _urgent(self, group: Group, step: int) -> bool:
        return self._settings.on_stale == "wait" and self._last_chance(group, step)

    def _last_chance(self, group: Group, step: int) -> bool:
        """Whether the group's first tokens would be too old for the batch after `step`."""
        return group.version.step < step - self._settings.max_staleness

    def restore(self, state: JournalState) -> None:
        """Groups of an earlier start: finished rollouts return, missing ones run again under the same task."""
        for recorded in state.groups.values():
            group = Group.restored(recorded.opened, recorded.done, group_size(self._config, recorded.opened.source))
            if group.finished:
                self._finish(group)
            else:
                self.open[group.group_id] = group

    async def run(self) -> None:
        """Open groups whenever there is room, until `close`."""
        async with asyncio.TaskGroup() as tasks:
            for group in self.open.values():
                self._start(tasks, group)
            while not self.closed:
                while self._may_open():
                    self._start(tasks, self._draw())
                async with self.changed:
                    await self.changed.wait()

    async def close(self) -> None:
        """Stop sampling and cancel what runs."""
        self.closed = True
        self.cancel_where(lambda _: True, "end")
        await self.notify()

    async def notify(self) -> None:
        """Look again whether there is room, after a new version or a cut batch."""
        async with self.changed:
            self.changed.notify_all()

    def cancel_where(self, hopeless: Callable[[Group], bool], reason: str) -> int:
        """Drop groups, running or waiting for a batch; returns how many rollouts were given up."""
        doomed = [g for g in self.open.values() if hopeless(g)]
        for group in doomed:
            self.open.pop(group.group_id)
            if task := self._tasks.pop(group.group_id, None):  # none before `run` starts those of an earlier start
                task.cancel()
        waiting = [g for g in self.ready if hopeless(g)]
        self.ready = [g for g in self.ready if not hopeless(g)]
        self.drop(doomed + waiting, reason)
        now = time.monotonic()
        for group in doomed + waiting:
            self.given_up[reason] += [now - group.begun] * group.size
        return sum(g.size for g in doomed + waiting)

    def drop(self, groups: list[Group], reason: str) -> None:
        """Take down that these groups will be in no batch."""
        if groups:
            self._journal.append(GroupsDropped(group_ids=[g.group_id for g in groups], reason=reason))

    def _may_open(self) -> bool:
        """Room for any group among running rollouts, no full batch waiting, and nothing sampled that is bound to be too
        old."""
        ahead = sum(g.size for g in self.open.values()) + self.ready_rollouts
        return (
            not self.closed
            and not self.paused
            and len(self._resting()) < len(self._stream.sources)
            and self._versions.lead < self._settings.max_lead + 1
            and self.ready_rollouts < self._settings.batch_size
            and self.inflight + self._largest <= self.limit
            and ahead < (self._settings.max_staleness + 1 - self._versions.lead) * self._settings.batch_size
        )

    def _draw(self) -> Group:
        source, draw, index = self._stream.draw(self._versions.shipped + 1, self._resting())
        size = group_size(self._config, source)
        group = Group(uuid.uuid4().hex[:12], source, index, self._versions.served, size)
        opened = GroupOpened(group_id=group.group_id, source=source, draw=draw, task_index=index, version=group.version)
        self._journal.append(opened)
        self.open[group.group_id] = group
        return group

    def _start(self, tasks: asyncio.TaskGroup, group: Group) -> None:
        self._tasks[group.group_id] = tasks.create_task(self._run_group(group))

    async def _run_group(self, group: Group) -> None:
        ended = {int(done.rollout.rollout_id.rpartition("-")[2]) for done in group.done}
        missing = [i for i in range(group.size) if i not in ended]  # they end in any order
        async with asyncio.TaskGroup() as rollouts:
            for i in missing:
                rollouts.create_task(self._run_rollout(group, f"{group.group_id}-{i}"))
        self._tasks.pop(group.group_id)
        self.open.pop(group.group_id)
        self._finish(group)
        await self.notify()

    def _finish(self, group: Group) -> None:
        """Every rollout of the group has ended."""
        self._stream.observe(group.source, group.task_index, [r.reward for r in group.scored])
        if self._settings.partial_groups == "drop" and len(group.scored) < len(group.done):
            self.drop([group], "partial")
            return
        group.informative = self._informative(group)
        self.ready.append(group)

    def _resting(self) -> set[str]:
        """Sources that pause and have a group open already, which says when they may go on."""
        return {group.source for group in self.open.values() if self._runner.pauses(group.source)}

    async def _run_rollout(self, group: Group, rollout_id: str) -> None:
        done = await self._runner.run(rollout_id, group.source, group.task_index, group.version)
        group.done.append(done)
        self.completed += done.rollout.failure is None
        self._journal.append(RolloutFinished(group_id=group.group_id, done=done))
        await self.notify()
