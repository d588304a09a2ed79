"""The orchestrator's driver: sample without pause, cut a batch whenever one is due, follow the trainer's versions."""

import asyncio
from dataclasses import replace
from pathlib import Path

from prime_hpc.algorithms.staleness import Lineages
from prime_hpc.cluster.role import Role
from prime_hpc.config.checks import source_name
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.orchestrator.batches import Batch, BatchMaker, BatchShelf
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.evals import Evaluator
from prime_hpc.orchestrator.fleet import Fleet, UpdateTimes
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.journal import BatchCut, Journal, Memory
from prime_hpc.orchestrator.ledger import Ledger
from prime_hpc.orchestrator.runner import Runner
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.orchestrator.versions import Versions
from prime_hpc.transport.batches import open_server
from prime_hpc.transport.checkpoints import read_manifest
from prime_hpc.transport.messages import PolicyVersion


class Orchestrator:
    """All parts of one attempt, wired together."""

    def __init__(self, role: Role):
        self.role, self.config = role, role.config
        checkpoint = read_manifest(Path(role.plan.checkpoint)) if role.plan.checkpoint else None
        self.start_step = checkpoint.step if checkpoint else 0
        self.journal = Journal(role.paths.journal, checkpoint.journal_offset if checkpoint else None)
        self.lineages = Lineages(role.plan.forks)
        self.pool, self.server = EnvPool(role), open_server(role)
        self.shelf = BatchShelf(self.config)
        self.maker = BatchMaker(self.config, self.lineages, self.journal.state.memory.credit)
        self.ledger = Ledger(role, self.start_step)

    async def run(self) -> None:
        """From the first hello to the complete mark."""
        self.role.rendezvous.publish("starting", env_address=self.pool.address, batch_address=self.server.address)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.pool.serve())]
            await self._connect()
            background += [
                tasks.create_task(self.server.serve(lambda request: self.ledger.answer(self.shelf, request))),
                tasks.create_task(self.versions.follow(self._on_published, self._on_update)),
                tasks.create_task(self.scheduler.run()),
                tasks.create_task(self.ledger.report_progress(self.scheduler, self.versions)),
            ]
            await self._evaluate(self.start_step, first=True)
            for step in range(self.start_step + 1, self.config.max_steps + 1):
                await self._ship(await self._cut(step))
            await self.scheduler.close()
            await self.ledger.wait_reported(self.config.max_steps)
            await asyncio.to_thread(self._wait_trained)
            await self._evaluate(self.config.max_steps, last=True)
            for task in background:
                task.cancel()
        await self._finish()

    async def _connect(self) -> None:
        self.fleet = await Fleet.connect(self.role)
        self.versions = Versions(self.role, self.fleet, self.lineages, self.start_step)
        await self.versions.first(self.config.cluster.start_timeout_s)
        train = {source_name(s): s for s in self.config.env.train}
        names = [*train, *(source_name(s) for s in self.config.env.eval.sources)]
        await self.pool.wait_ready(names, self.config.env.start_timeout_s)
        self.tasks = TaskStream(train, self.pool.num_tasks, self.config.seed)
        self.tasks.restore(self.journal.state.memory.tasks, self.journal.state.draws)
        self.runner = Runner(self.role, self.pool, self.fleet)
        self.evaluator = Evaluator(self.role, self.runner, self.pool)
        self.scheduler = Scheduler(self.role, self.runner, self.tasks, self.versions, self.journal)
        self.scheduler.restore(self.journal.state)
        self.role.rendezvous.publish("sampling")

    async def _cut(self, step: int) -> Batch:
        """The next batch with anything to train on, as soon as enough rollouts wait and the trainer is near."""
        await self.versions.wait_published(step - self.config.orchestrator.max_lead)
        for _ in range(self.config.orchestrator.max_empty_batches):
            batch = self.maker.make(step, await self._take())
            if batch.samples:
                return batch
            self._journal(step - 1, batch)
            self.role.log.warning("no token of %d rollouts carries an advantage, sampling on", len(batch.rollouts))
        raise InfrastructureFailure(f"{self.config.orchestrator.max_empty_batches} batches in a row had no trainable "
                                    "token: every group has equal rewards; change the tasks or the reward")  # fmt: skip

    async def _take(self) -> list[Group]:
        """Groups of one batch, in the order they finished."""
        size, scheduler = self.config.orchestrator.batch_size, self.scheduler
        async with scheduler.changed:
            await scheduler.changed.wait_for(lambda: scheduler.ready_rollouts >= size)
        groups, count = [], 0
        while count < size:
            groups.append(scheduler.ready.pop(0))
            count += len(groups[-1].done)
        return groups

    async def _ship(self, batch: Batch) -> None:
        offset = self._journal(batch.step, batch)
        await self.shelf.put(replace(batch, journal_offset=offset))
        self.versions.shipped = batch.step
        await self.ledger.shipped(batch)
        await self.scheduler.notify()

    def _journal(self, step: int, batch: Batch) -> int:
        groups, samples = [g.group_id for g in batch.groups], [s.sample_id for s in batch.samples]
        memory = Memory(credit=self.maker.state(), tasks=self.tasks.state())
        self.journal.append(BatchCut(step=step, group_ids=groups, sample_ids=samples, memory=memory), durable=True)
        return self.journal.offset

    async def _on_published(self) -> None:
        """Drop groups whose first tokens would be too old for the next batch."""
        oldest = self.versions.shipped - self.config.orchestrator.max_staleness
        given_up = self.scheduler.cancel_where(lambda group: group.version.step < oldest)
        if given_up:
            self.role.log.info("gave up %d rollouts that would be too old", given_up)

    async def _on_update(self, version: PolicyVersion, times: UpdateTimes) -> None:
        self.ledger.updated(version, times)
        await self.scheduler.notify()
        await self._evaluate(version.step)

    async def _evaluate(self, step: int, *, first: bool = False, last: bool = False) -> None:
        if not self.evaluator.due(step, first=first, last=last) or (step == self.config.max_steps and not last):
            return
        await self.versions.wait_served(step)
        self.ledger.evaluated(step, await self.evaluator.run(self.versions.served))

    def _wait_trained(self) -> None:
        """The ranks still need answers until they have marked themselves trained."""
        for rank in self.role.plan.of("trainer"):
            self.role.rendezvous.wait(rank.name, "trained", self.config.trainer.collective_timeout_s)

    async def _finish(self) -> None:
        await self.fleet.close()
        self.journal.close()
        self.ledger.close()
        self.role.mark_complete()
