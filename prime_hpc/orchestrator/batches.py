"""From finished groups to batches: credit, staleness, pruning. A shipped batch is kept until a checkpoint covers it."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from prime_hpc.algorithms.advantages import advantages, with_advantage
from prime_hpc.algorithms.packing import pack
from prime_hpc.algorithms.routing import route
from prime_hpc.algorithms.staleness import Lineages, restrict, token_staleness
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import CorruptData
from prime_hpc.models.spec import train_flops
from prime_hpc.orchestrator.groups import Group
from prime_hpc.orchestrator.journal import RecordedBatch
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import BatchRequest, MicroBatch, RankBatch, Rollout, RolloutDone, Sample


@dataclass(frozen=True)
class Batch:
    """What step `step` trains on. `journal_offset` is where a resume after this step begins."""

    step: int
    samples: list[Sample]
    groups: list[Group]
    dropped: Counter
    staleness: np.ndarray
    journal_offset: int = 0

    @property
    def rollouts(self) -> list[RolloutDone]:
        return [done for group in self.groups for done in group.done]

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.scored]


class BatchMaker:
    """Turns groups into the samples of a batch."""

    def __init__(self, config: RunConfig, lineages: Lineages):
        self._config = config
        self._lineages = lineages

    def make(self, step: int, groups: list[Group]) -> Batch:
        """Assign advantages, drop what is too old for `step`, leave out what carries no gradient."""
        return self._make(step, groups, self._lineages)

    def make_again(self, recorded: RecordedBatch) -> Batch:
        """The batch that was cut before, from the journal: the same samples under the lineages of that time.

        Raises:
            CorruptData: other samples come out than were cut.
        """
        size, cut = self._config.orchestrator.group_size, recorded.cut
        groups = [Group.restored(group.opened, group.done, size) for group in recorded.groups]
        batch = self._make(cut.step, groups, self._lineages.until(cut.lineage))
        if [s.sample_id for s in batch.samples] != cut.sample_ids:
            raise CorruptData(f"batch {cut.step} cannot be made again from the journal: its samples differ; "
                              f"resume={cut.step - 1} starts from a checkpoint before it")  # fmt: skip
        return replace(batch, journal_offset=recorded.offset)

    def _make(self, step: int, groups: list[Group], lineages: Lineages) -> Batch:
        dropped: Counter = Counter()
        samples = []
        for sample in (s for group in groups for s in self._credit(group)):
            kept, reasons = restrict(sample, step, self._config.orchestrator.max_staleness, lineages)
            dropped.update(reasons)
            if "unstamped" in reasons:  # what its other tokens saw is not known either
                dropped["unstamped"] += int(kept.mask.numpy().sum())
            else:
                samples.append(kept)
        ages = [token_staleness(sample, step) for sample in samples]
        staleness = np.concatenate(ages) if ages else np.zeros(0, dtype=np.int64)
        if self._config.orchestrator.drop_zero_advantage:
            samples = [_without_zero_advantage(sample, dropped) for sample in samples]
        return Batch(step, [s for s in samples if _trains(s)], groups, dropped, staleness)

    def _credit(self, group: Group) -> list[Sample]:
        scored = group.scored
        values = advantages(np.array([r.reward for r in scored]), self._config.algorithm.name)
        return [route(with_advantage(sample, float(value)), "rl")
                for rollout, value in zip(scored, values, strict=True) for sample in rollout.samples]  # fmt: skip


class BatchShelf:
    """Shipped batches by step, until a complete checkpoint covers them; packs them for whoever asks."""

    def __init__(self, config: RunConfig):
        self._max_tokens = config.trainer.micro_batch_tokens or config.seq_len
        self._last = config.max_steps
        self._model = json.loads((Path(config.model.path) / "config.json").read_text())
        self._batches: dict[int, Batch] = {}
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

    async def answer(self, request: BatchRequest) -> RankBatch:
        """The asked batch as the rank sees it, once it exists; an empty one past the last step."""
        self._forget(request.checkpointed)
        async with self._changed:
            await self._changed.wait_for(lambda: request.step in self._batches or request.step > self._last)
        if request.step > self._last:
            return _nothing_left(request)
        batch = self._batches[request.step]
        ranks = await self._pack(batch, request.world)
        return RankBatch(
            step=batch.step,
            rank=request.rank,
            micro_batches=ranks[request.rank],
            sample_ids=[s.sample_id for s in batch.samples],
            journal_offset=batch.journal_offset,
        )

    async def _pack(self, batch: Batch, world: int) -> list[list[MicroBatch]]:
        key = (batch.step, world)
        if key not in self._packed:
            self._packed[key] = asyncio.create_task(asyncio.to_thread(self._pack_now, batch, world))
        return await self._packed[key]

    def _pack_now(self, batch: Batch, world: int) -> list[list[MicroBatch]]:
        return pack(batch.samples, world, self._max_tokens, partial(train_flops, self._model))

    def _forget(self, checkpointed: int) -> None:
        self._batches = {step: b for step, b in self._batches.items() if step > checkpointed}
        self._packed = {key: task for key, task in self._packed.items() if key[0] > checkpointed}


def _nothing_left(request: BatchRequest) -> RankBatch:
    return RankBatch(step=request.step, rank=request.rank, micro_batches=[], sample_ids=[], journal_offset=0, last=True)


def _without_zero_advantage(sample: Sample, dropped: Counter) -> Sample:
    """`sample` with its zero-advantage tokens out of the policy-gradient component and so out of its normaliser."""
    mask, values = sample.mask.numpy(), sample.advantages.numpy()
    zero = mask & (values == 0)
    if not zero.any():
        return sample
    dropped["zero_advantage"] += int(zero.sum())
    weights = np.ones(len(mask), dtype=np.float32) if sample.rl_weights is None else sample.rl_weights.numpy().copy()
    weights[zero] = 0
    return msgspec.structs.replace(sample, rl_weights=Array.of(weights, "f4"))


def _trains(sample: Sample) -> bool:
    """Whether any token of the sample is a member of any loss component."""
    rl = sample.mask.numpy() & (True if sample.rl_weights is None else sample.rl_weights.numpy() != 0)
    others = [w for w in (sample.ce_weights, sample.ref_kl_weights) if w is not None]
    return bool(rl.any() or any(w.numpy().any() for w in others))
