"""From finished groups to batches: credit, staleness, pruning. A shipped batch is kept until a checkpoint covers it."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from prime_hpc.algorithms.credit import CreditAssigner, informative
from prime_hpc.algorithms.filters import (
    is_off_difficulty,
    trains,
    unfit,
    without_sampled_tokens,
    without_zero_advantage,
)
from prime_hpc.algorithms.packing import pack_batch
from prime_hpc.algorithms.staleness import Lineages, discounted, restrict, token_staleness
from prime_hpc.algorithms.trajectories import trajectories
from prime_hpc.config.checks import group_size, source_algorithm
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import CorruptData
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.journal import RecordedBatch
from prime_hpc.transport.images import images_of
from prime_hpc.transport.messages import (
    BatchRequest,
    MicroBatch,
    PolicyVersion,
    RankBatch,
    Rollout,
    RolloutDone,
    Sample,
)

LeaveOut = Callable[[Sample], tuple[Sample, int]]
"""Gives a sample without some of its tokens, and their number."""


class Dropped(Counter[str]):
    """Tokens that left the mask by reason, and in `lengths` the sampled tokens of every sample that they left."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[str, list[int]] = defaultdict(list)

    def note(self, sample: Sample, reasons: Mapping[str, int]) -> None:
        """`sample`, as it was before, loses so many tokens."""
        for reason, count in reasons.items():
            self[reason] += count
            self.lengths[reason].append(int(sample.mask.numpy().sum()))


@dataclass(frozen=True)
class Batch:
    """What step `step` trains on. `journal_offset` is where a resume after this step begins."""

    step: int
    samples: list[Sample]
    groups: list[Group]
    dropped: Dropped
    ages: dict[str, np.ndarray]
    """Staleness of the tokens that may train, by source."""
    journal_offset: int = 0
    lr: float | None = None
    """Peak learning rate from this step on, where it was changed while the run worked."""

    @property
    def staleness(self) -> np.ndarray:
        """Of the tokens of all sources."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.ages.values()])

    @property
    def rollouts(self) -> list[RolloutDone]:
        return [done for group in self.groups for done in group.done]

    @property
    def images(self) -> dict[str, bytes]:
        """The encoded images of its rollouts, by digest."""
        return {digest: data for done in self.rollouts for digest, data in done.rollout.images.items()}

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.scored]


class BatchMaker:
    """Turns groups into the samples of a batch."""

    def __init__(self, config: RunConfig, lineages: Lineages, memory: Mapping[str, dict[str, float]] | None = None):
        """`memory` is the `state` of an earlier attempt."""
        self._config = config
        self._lineages = lineages
        self._remember(memory or {})

    def make(self, step: int, groups: list[Group]) -> Batch:
        """Assign advantages, leave out what is unfit, too old for `step` or without gradient.

        Groups that give no sample leave no trace in what the algorithms remember.
        """
        before = self.state()
        batch = self._make(step, groups, self._lineages, self._config.orchestrator.max_staleness)
        if not batch.samples:
            self._remember(before)
        return batch

    def make_again(self, recorded: RecordedBatch) -> Batch:
        """The batch that was cut before, from the journal: the same samples under the lineages of that time.

        Raises:
            CorruptData: other samples come out than were cut.
        """
        cut = recorded.cut
        groups = [Group.restored(group.opened, group.done, group_size(self._config, group.opened.source))
                  for group in recorded.groups]  # fmt: skip
        self._remember(recorded.before.credit)
        bound = self._config.orchestrator.max_staleness if cut.max_staleness is None else cut.max_staleness
        batch = self._make(cut.step, groups, self._lineages.until(cut.lineage), bound)
        if [s.sample_id for s in batch.samples] != cut.sample_ids:
            raise CorruptData(f"batch {cut.step} cannot be made again from the journal: its samples differ; "
                              f"resume={cut.step - 1} starts from a checkpoint before it")  # fmt: skip
        return replace(batch, journal_offset=recorded.offset, lr=cut.lr)

    def _make(self, step: int, groups: list[Group], lineages: Lineages, max_staleness: int) -> Batch:
        dropped, samples, settings = Dropped(), [], self._config.orchestrator
        for sample in self._credit(groups, dropped):
            if source_algorithm(self._config, sample.source).component == "ce":
                samples.append(sample)  # a teacher's tokens have no version of the policy
                continue
            kept, reasons = restrict(sample, step, max_staleness, lineages)
            if "unstamped" in reasons:  # what its other tokens saw is not known either
                reasons["unstamped"] += int(kept.mask.numpy().sum())
            else:
                samples.append(kept if settings.age_discount == 1 else discounted(kept, step, settings.age_discount))
            dropped.note(sample, reasons)
        ages: dict[str, list[np.ndarray]] = defaultdict(list)
        for sample in samples:
            ages[sample.source].append(token_staleness(sample, step))
        staleness = {source: np.concatenate(own) for source, own in ages.items()}
        if settings.drop_zero_advantage:
            samples = [_counted(sample, without_zero_advantage, dropped, "zero_advantage") for sample in samples]
        return Batch(step, [s for s in samples if trains(s)], groups, dropped, staleness)

    def informative(self, group: Group) -> bool:
        """Whether a finished group would train anything by itself."""
        algorithm = source_algorithm(self._config, group.source)
        if not any(trains(sample) for sample in self._fit(group, _samples(group), Dropped())):
            return False
        played = [t for rollout in group.scored for t in trajectories(rollout)]
        return not self._config.orchestrator.drop_zero_advantage or informative(played, algorithm)

    def state(self) -> dict[str, dict[str, float]]:
        """What the algorithms of the sources remember."""
        seen = {source: state for source, assigner in self._assigners.items() if (state := assigner.state())}
        return {**self._memory, **seen}

    def _credit(self, groups: list[Group], dropped: Dropped) -> list[Sample]:
        """All samples in order of their groups. Each source's groups are credited together, by its own algorithm."""
        credited: dict[str, list[Sample]] = {}
        for source in dict.fromkeys(group.source for group in groups):
            own = [group for group in groups if group.source == source]
            played = [[t for rollout in group.scored for t in trajectories(rollout)] for group in own]
            credited |= zip((g.group_id for g in own), self._assigner(source).assign(played), strict=True)
        return [sample for group in groups for sample in self._fit(group, credited[group.group_id], dropped)]

    def _fit(self, group: Group, samples: list[Sample], dropped: Dropped) -> list[Sample]:
        """The group's samples, those that the source's filters find without their sampled tokens."""
        filters = source_algorithm(self._config, group.source).filters
        off = filters.difficulty and is_off_difficulty([r.reward for r in group.scored], filters.difficulty)
        reasons = {s.sample_id: "difficulty" if off else unfit(r, filters) for r in group.scored for s in r.samples}
        return [_counted(sample, without_sampled_tokens, dropped, reason) if (reason := reasons[sample.sample_id])
                else sample for sample in samples]  # fmt: skip

    def _remember(self, memory: Mapping[str, dict[str, float]]) -> None:
        """Go on from a `state`; each source's algorithm is made when it is first needed."""
        self._memory = memory
        self._assigners: dict[str, CreditAssigner] = {}

    def _assigner(self, source: str) -> CreditAssigner:
        if source not in self._assigners:
            self._assigners[source] = CreditAssigner(source_algorithm(self._config, source))
            self._assigners[source].restore(self._memory.get(source, {}))
        return self._assigners[source]


class BatchShelf:
    """Shipped batches by step, until a complete checkpoint covers them; packs them for whoever asks."""

    def __init__(self, config: RunConfig):
        self._config, self._last = config, config.max_steps
        self._batches: dict[int, Batch] = {}
        self._weights_first = 0
        """The step before which all ranks are to write weights."""
        self._packed: dict[tuple[int, int], asyncio.Task[list[list[MicroBatch]]]] = {}
        self._changed = asyncio.Condition()

    async def close(self, last: int) -> None:
        """No batch comes after `last`; whoever asks for one is told so."""
        self._last = last
        async with self._changed:
            self._changed.notify_all()

    async def put(self, batch: Batch) -> None:
        self._batches[batch.step] = batch
        async with self._changed:
            self._changed.notify_all()

    async def ask_for_weights(self, version: PolicyVersion) -> None:
        """Have the trainer write `version` whole before the next batch, if it has none to train on: one that has will
        publish soon anyway."""
        step = version.step + 1
        if step in self._batches or step > self._last:
            return
        async with self._changed:
            self._weights_first = step
            self._changed.notify_all()

    def holds(self, step: int) -> bool:
        return step in self._batches

    async def answer(self, request: BatchRequest) -> RankBatch:
        """The asked batch as the rank sees it, once it exists; an empty one past the last step, and where weights are
        to be written first, which all ranks are told before any of them gets the batch."""
        self._forget(request.checkpointed)
        async with self._changed:
            await self._changed.wait_for(
                lambda: request.step in self._batches or request.step > self._last or self._is_to_write(request)
            )
        if self._is_to_write(request):
            return _empty(request, write_weights=True)
        if request.step > self._last:
            return _empty(request, last=True)
        batch = self._batches[request.step]
        ranks = await self._pack(batch, request.world)
        return RankBatch(
            step=batch.step,
            rank=request.rank,
            micro_batches=ranks[request.rank],
            sample_ids=[s.sample_id for s in batch.samples],
            journal_offset=batch.journal_offset,
            lr=batch.lr,
            images=images_of(ranks[request.rank], batch.images),
        )

    def _is_to_write(self, request: BatchRequest) -> bool:
        return request.step == self._weights_first and not request.written

    async def _pack(self, batch: Batch, world: int) -> list[list[MicroBatch]]:
        key = (batch.step, world)
        if key not in self._packed:
            self._packed[key] = asyncio.create_task(asyncio.to_thread(pack_batch, batch.samples, world, self._config))
        return await self._packed[key]

    def _forget(self, checkpointed: int) -> None:
        self._batches = {step: b for step, b in self._batches.items() if step > checkpointed}
        self._packed = {key: task for key, task in self._packed.items() if key[0] > checkpointed}


def _empty(request: BatchRequest, *, last: bool = False, write_weights: bool = False) -> RankBatch:
    return RankBatch(step=request.step, rank=request.rank, micro_batches=[], sample_ids=[], journal_offset=0, last=last,
                     write_weights=write_weights)  # fmt: skip


def _samples(group: Group) -> list[Sample]:
    return [sample for rollout in group.scored for sample in rollout.samples]


def _counted(
    sample: Sample, leave_out: Callable[[Sample], tuple[Sample, int]], dropped: Dropped, reason: str
) -> Sample:
    left, count = leave_out(sample)
    if count:
        dropped.note(sample, {reason: count})
    return left
