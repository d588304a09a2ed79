"""The orchestrator's driver: sample without pause, cut a batch whenever one is due, follow the trainer's versions."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from prime_hpc.algorithms.staleness import Lineages
from prime_hpc.cluster.role import Role
from prime_hpc.config.checks import source_name
from prime_hpc.errors import EnvironmentFailure
from prime_hpc.orchestrator.batches import Batch, BatchMaker, BatchShelf
from prime_hpc.orchestrator.env_pool import EnvPool
from prime_hpc.orchestrator.evals import Evaluator
from prime_hpc.orchestrator.fleet import Fleet, UpdateTimes
from prime_hpc.orchestrator.frozen import FrozenModels
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.journal import BatchCut, Memory, RecordedBatch, open_journal
from prime_hpc.orchestrator.ledger import Ledger
from prime_hpc.orchestrator.live import LiveControl
from prime_hpc.orchestrator.load import LoadControl
from prime_hpc.orchestrator.report import describe_outcome
from prime_hpc.orchestrator.runner import Runner
from prime_hpc.orchestrator.scheduler import Scheduler
from prime_hpc.orchestrator.tasks import TaskStream
from prime_hpc.orchestrator.versions import Versions
from prime_hpc.orchestrator.waiting import in_time
from prime_hpc.plan.run_plan import read_forks
from prime_hpc.transport.batches import open_server
from prime_hpc.transport.checkpoints import CheckpointManifest, find_latest, oldest_offset, read_manifest
from prime_hpc.transport.messages import BatchRequest, PolicyVersion, RankBatch, StepReport

DRAIN_POLL_S = 0.5


class Orchestrator:
    """All parts of one attempt, wired together."""

    def __init__(self, role: Role):
        self.role, self.config = role, role.config
        self.trains = self.config.mode == "rl"
        if not self.trains:
            self.config.orchestrator.max_staleness = self.config.max_steps  # the base model never ages
        checkpoint = _covering(role)
        self.start_step = checkpoint.step if checkpoint else 0
        self.journal = open_journal(role, checkpoint)
        self.lineages = Lineages(read_forks(role.paths.forks))
        self.pool, self.server = EnvPool(role), open_server(role)
        self.shelf = BatchShelf(self.config)
        self.maker = BatchMaker(self.config, self.lineages, self.journal.state.memory.credit)
        self.ledger = Ledger(role, self.start_step)
        self.drained = False
        self.failure: EnvironmentFailure | None = None
        """Why the run cannot go on, once it is to save and leave for that."""
        self._shipping_again = asyncio.Lock()

    async def run(self) -> None:
        """From the first hello to the complete mark."""
        self.role.rendezvous.publish("starting", env_address=self.pool.address, batch_address=self.server.address)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.pool.serve())]
            await self._connect()
            await self._ship_again(self.journal.state.batches.values())
            # before the first version, as engines may need the trainer to write it
            background += [
                tasks.create_task(self.fleet.watch()),
                tasks.create_task(self.server.serve(self._answer)),
            ]
            await self._prepare(tasks)
            background += [
                tasks.create_task(self.frozen.watch()),
                tasks.create_task(self.live.follow()),
                tasks.create_task(self.load.follow()),
                tasks.create_task(self._follow()),
                tasks.create_task(self.scheduler.run()),
                tasks.create_task(self.ledger.report_progress(self.pool, self.scheduler, self.versions, self.runner)),
                tasks.create_task(self._watch_drain()),
            ]
            while not self.config.evaluates_alone and self.versions.shipped < self.config.max_steps:
                batch = await self._cut(self.versions.shipped + 1)
                if batch is None:
                    break
                await self._ship(batch)
            await self._close()
            for task in background:
                task.cancel()
        await self._finish()

    async def _connect(self) -> None:
        self.fleet = await Fleet.connect(self.role, self.shelf.ask_for_weights)
        self.frozen = await FrozenModels.connect(self.role)
        shipped = max(self.start_step, self.journal.state.step)
        self.versions = Versions(self.role, self.fleet, self.lineages, self.start_step, shipped)

    async def _prepare(self, tasks: asyncio.TaskGroup) -> None:
        """Have engines and environments ready, and all that draws from them; evaluations will run in `tasks`."""
        if self.trains:
            await self.versions.first(self.config.cluster.start_timeout_s)
        train = {source_name(s): s for s in self.config.env.train}
        names = [*train, *(source_name(s) for s in self.config.env.eval.sources)]
        with self.role.heart.waiting("workers of every source", "environment", self.config.env.start_timeout_s):
            await self.pool.wait_ready(names, self.config.env.start_timeout_s)
        self.tasks = TaskStream(train, self.pool.num_tasks, self.config.seed)
        self.tasks.restore(self.journal.state)
        self.runner = Runner(self.role, self.pool, self.fleet, self.frozen)
        self.evaluator = Evaluator(self.role, self.runner, self.pool, tasks, self.ledger.evaluated,
                                   self.ledger.last_evaluated)  # fmt: skip
        self.scheduler = Scheduler(self.role, self.runner, self.tasks, self.versions, self.journal,
                                   self.maker.informative)  # fmt: skip
        self.scheduler.restore(self.journal.state)
        self.live = LiveControl(self.role, self.scheduler, self.tasks)
        self.load = LoadControl(self.role, self.fleet, self.pool, self.scheduler, self.versions)
        self.role.rendezvous.publish("sampling")

    async def _ship_again(self, batches: Iterable[RecordedBatch]) -> None:
        """Put batches that no checkpoint covers back on the shelf, as they were cut."""
        maker = BatchMaker(self.config, self.lineages)
        for recorded in list(batches):
            batch = maker.make_again(recorded)
            await self.shelf.put(batch)
            await self.ledger.shipped(batch, recorded.cut.lineage)
            await self._pass_over(batch.step)

    async def _answer(self, request: BatchRequest) -> RankBatch:
        """The batch that a rank asks for, if need be from the journal.

        That is where the newest checkpoint was damaged, and the trainer went back to one before it.
        """
        if request.checkpointed > self.journal.state.covered:
            await self.journal.flush()
        if request.checkpointed > self.journal.state.covered:  # still: several ranks ask
            self.role.lease.check()
            self.journal.cover(request.checkpointed, oldest_offset(self.role.paths.checkpoints))
        async with self._shipping_again:
            if request.step <= self.versions.shipped and not self.shelf.holds(request.step):
                await self._ship_again(self.journal.batches_behind(request.checkpointed))
        return await self.ledger.answer(self.shelf, request)

    async def _watch_drain(self) -> None:
        """Wake whoever waits once the run is asked to leave, or has paused for too long."""
        while not await asyncio.to_thread(lambda: self.role.draining) and not self.failure:
            await asyncio.sleep(DRAIN_POLL_S)
            self.failure = self.runner.paused_too_long
        self.drained = True
        self.runner.release()
        await self.versions.notify()
        await self.scheduler.notify()

    async def _cut(self, step: int) -> Batch | None:
        """The next batch with anything to train on, as soon as enough rollouts wait and the trainer is near.

        None once the run is asked to leave.
        """
        near = step - self.config.orchestrator.max_lead
        trained = self.versions.wait_until(lambda: self.versions.published.step >= near or self.drained)
        await in_time(self.role, f"version {near}", "trainer-0", trained)
        for _ in range(self.config.orchestrator.max_empty_batches):
            groups = await self._take(step)
            if self.drained:
                return None
            batch = self.maker.make(step, groups)
            if batch.samples:
                return batch
            if not any(group.informative for group in groups):
                break
            self.scheduler.drop(batch.groups, "no_gradient")
            self.role.log.warning("no token of %d rollouts carries an advantage, sampling on", len(batch.rollouts))
        raise EnvironmentFailure(f"{self.config.orchestrator.max_empty_batches} batches in a row had no trainable "
                                 f"token: every group has equal rewards ({describe_outcome(groups)}); "
                                 "change the tasks or the reward")  # fmt: skip

    async def _take(self, step: int) -> list[Group]:
        """Groups of batch `step`; none once the run is asked to leave."""
        size, scheduler = self.config.orchestrator.batch_size, self.scheduler
        async with scheduler.changed:
            enough = scheduler.changed.wait_for(lambda: scheduler.enough(step) or self.drained)
            await in_time(self.role, f"{size} finished rollouts", "environment", enough)
        return [] if self.drained else scheduler.take(step)

    async def _ship(self, batch: Batch) -> None:
        self.role.reach("batch.before")
        self.role.lease.check()
        group_ids, sample_ids = [g.group_id for g in batch.groups], [s.sample_id for s in batch.samples]
        cut = BatchCut(
            step=batch.step,
            lineage=self.lineages.current,
            group_ids=group_ids,
            sample_ids=sample_ids,
            memory=Memory(credit=self.maker.state(), tasks=self.tasks.state()),
            max_staleness=self.config.orchestrator.max_staleness,
            lr=self.live.lr,
        )
        self.journal.append(cut)
        batch = replace(batch, journal_offset=self.journal.offset, lr=cut.lr)
        await self.journal.flush()
        self.role.reach("batch.during")
        self.ledger.note(batch.step, self.load.take_metrics() | self.tasks.metrics())
        await self.shelf.put(batch)
        self.versions.shipped = batch.step
        self._give_up()
        await self.ledger.shipped(batch, self.lineages.current, self.scheduler.given_up)
        self.scheduler.given_up.clear()
        await self._pass_over(batch.step)
        await self.scheduler.notify()
        self.role.heart.progress(f"shipped batch {batch.step}")
        self.role.reach("batch.after")

    async def _pass_over(self, step: int) -> None:
        """Where nobody trains, a batch is done once it is shipped."""
        if not self.trains:
            self.versions.published = PolicyVersion(self.lineages.current, step)
            await self.ledger.report(StepReport(step=step, metrics={}))

    async def _close(self) -> None:
        """Stop sampling, let the trainer finish what was shipped, and evaluate what came of it."""
        last = min(self.versions.shipped, self.config.max_steps)  # fewer where a resume lowered max_steps
        await self.shelf.close(last)
        await self.scheduler.close()
        self.role.reach("shutdown.before")
        await in_time(self.role, f"the report of step {last}", "trainer-0", self.ledger.wait_reported(last))
        await asyncio.to_thread(self._wait_trained)
        self.role.reach("shutdown.during")
        await self._evaluate_last(last)

    async def _follow(self) -> None:
        """Follow the trainer's versions, and evaluate those that are due. One that nobody trains is always the same."""
        if self.trains:
            await self._evaluate(self.versions.served, self.evaluator.owed)
        await self.versions.follow(self._on_published, self._on_update)

    async def _on_published(self) -> None:
        self._give_up()
        self.evaluator.cancel_where(lambda version: not self.lineages.alive(version), "the trainer went back")

    def _give_up(self) -> None:
        """Drop groups whose first tokens would be too old for the next batch, or come from abandoned weights."""
        oldest = self.versions.shipped - self.config.orchestrator.max_staleness
        stale = self.scheduler.cancel_where(lambda group: group.version.step < oldest, "stale")
        lost = self.scheduler.cancel_where(lambda group: not self.lineages.alive(group.version), "lineage")
        if stale or lost:
            self.role.log.info("gave up %d rollouts that would be too old, %d of abandoned weights", stale, lost)

    async def _on_update(self, version: PolicyVersion, times: UpdateTimes) -> None:
        self.ledger.updated(version, times)
        await self.scheduler.notify()
        await self._evaluate(version, self.evaluator.due)

    async def _evaluate(self, version: PolicyVersion, choose: Callable[[int], list[str]]) -> None:
        """Begin to evaluate what serves, and hold updates back where that is wanted. The last version has its time."""
        if version.step < self.config.max_steps:
            self.evaluator.start(version.step, version, choose(version.step))
            await self.evaluator.hold(version)

    async def _evaluate_last(self, step: int) -> None:
        """Evaluate what training came to, unless the run leaves before its end: then it does so when it goes on."""
        early = self.drained and step < self.config.max_steps and not self.config.evaluates_alone
        if early or self.failure:
            self.evaluator.close()
        elif sources := self.evaluator.missing(step):
            version = PolicyVersion.parse(self.config.inference.attach.version)
            if self.trains:
                await in_time(self.role, f"version {step} in force", "inference-0", self.versions.wait_served(step))
                version = self.versions.served
            self.evaluator.start(step, version, sources)
        await self.evaluator.finish()

    def _wait_trained(self) -> None:
        """The ranks still need answers until they have marked themselves trained."""
        for rank in self.role.plan.of("trainer"):
            timeout_s = self.config.trainer.collective_timeout_s
            with self.role.heart.waiting("its last checkpoint", rank.name, timeout_s):
                self.role.rendezvous.wait(rank.name, "trained", timeout_s)

    async def _finish(self) -> None:
        await self.fleet.close()
        self.journal.close()
        self.ledger.close()
        self.role.reach("shutdown.after")
        if self.failure:
            raise self.failure
        self.role.mark_complete()


def _covering(role: Role) -> CheckpointManifest | None:
    """The checkpoint behind which batches are needed: the plan's, or later in the attempt the newest there is.

    Offsets in checkpoints of another run are none in this journal.
    """
    newest = find_latest(role.paths.checkpoints, read_forks(role.paths.forks)) if role.restart else None
    path = newest or (Path(role.plan.checkpoint) if role.plan.checkpoint else None)
    if path is None:
        return None
    manifest = read_manifest(path)
    return manifest if path.parent == role.paths.checkpoints else msgspec.structs.replace(manifest, journal_offset=0)
