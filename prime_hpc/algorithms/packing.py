"""From the samples of a batch to micro-batches of every rank: a pure function of lengths, ranks and row size."""

import heapq
import json
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from prime_hpc.algorithms.staleness import single_version
from prime_hpc.config.run import RunConfig
from prime_hpc.models.spec import train_flops
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, ImageSpan, MicroBatch, RoutedExperts, Sample, whole_images

Cost = Callable[[list[int]], float]
"""Work of one row that holds sequences of these lengths, in any unit."""

SWAPS_PER_RANK = 8
"""Bound on the refinement; the first few swaps close nearly all of the gap."""


def pack(samples: list[Sample], ranks: int, max_tokens: int, cost: Cost | None = None) -> list[list[MicroBatch]]:
    """Micro-batches of each of `ranks` ranks: as many for each, of at most `max_tokens` tokens, with like work.

    Longer samples are cut, never within an image. Where there are too few samples for the ranks, the rest is filled
    with dummies: copies with an empty mask. `cost` is the number of tokens when left out.

    Raises:
        ValueError: no samples, or a token without what its component needs: an advantage, or the reference's
            log-probability.
    """
    if not samples:
        raise ValueError("a batch without samples cannot be packed")
    lengths = [_length(sample, max_tokens) for sample in samples]
    cost = cost or (lambda row: float(sum(row)))
    shortest = int(np.argmin(lengths))
    return [fill(rows, samples.__getitem__, shortest, max_tokens) for rows in arrange(lengths, ranks, max_tokens, cost)]


def fill(rows: list[list[int]], sample: Callable[[int], Sample], shortest: int, max_tokens: int) -> list[MicroBatch]:
    """The micro-batches of one rank's rows, as `arrange` has them; a copy of the sample `shortest` is the dummy."""
    return [_join([sample(i) for i in row], max_tokens) if row else _dummy(sample(shortest), max_tokens)
            for row in rows]  # fmt: skip


def pack_batch(samples: list[Sample], ranks: int, config: RunConfig) -> list[list[MicroBatch]]:
    """`pack` into the rows of a run, by the FLOPs of its model."""
    model = json.loads((Path(config.model.path) / "config.json").read_text())
    return pack(samples, ranks, config.trainer.micro_batch_tokens or config.seq_len, partial(train_flops, model))


def arrange(lengths: list[int], ranks: int, max_tokens: int, cost: Cost) -> list[list[list[int]]]:
    """Indices into `lengths`, by rank and row. An empty row stands for a dummy.

    Rows of one position have like costs over the ranks, since ranks meet at every micro-batch.
    """
    rows = _best_fit_decreasing(lengths, max_tokens)
    rows = _split_to_multiple(rows, lengths, ranks, cost)
    rows += [[] for _ in range(-len(rows) % ranks)]
    costs = np.array([_row_cost(row, lengths, cost) for row in rows])
    grid = _refine(_deal(costs, ranks), costs)
    return [[rows[i] for i in column[np.argsort(-costs[column], kind="stable")]] for column in grid.T]


def _row_cost(row: list[int], lengths: list[int], cost: Cost) -> float:
    return cost([lengths[i] for i in row]) if row else 0.0


def _best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows of at most `capacity` tokens: each sample, longest first, joins the fullest row with room (Johnson 1973).

    O(n log n): open rows are kept sorted by free tokens, and a row that the shortest sample overflows leaves them.
    """
    shortest = min(lengths)
    open_rows: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for i in np.argsort(-np.array(lengths), kind="stable").tolist():
        place = bisect_left(open_rows, (lengths[i], 0))
        if place == len(open_rows):
            rows.append([])
            free, row = capacity, len(rows) - 1
        else:
            free, row = open_rows.pop(place)
        rows[row].append(i)
        if free - lengths[i] >= shortest:
            insort(open_rows, (free - lengths[i], row))
    return rows


def _split_to_multiple(rows: list[list[int]], lengths: list[int], ranks: int, cost: Cost) -> list[list[int]]:
    """Halve the costliest rows until their number is a multiple of `ranks` or none can be halved."""
    heap = [(-_row_cost(row, lengths, cost), i) for i, row in enumerate(rows) if len(row) > 1]
    heapq.heapify(heap)
    while len(rows) % ranks and heap:
        _, i = heapq.heappop(heap)
        rows[i], half = _halve(rows[i], lengths, cost)
        rows.append(half)
        for j in (i, len(rows) - 1):
            if len(rows[j]) > 1:
                heapq.heappush(heap, (-_row_cost(rows[j], lengths, cost), j))
    return rows


def _halve(row: list[int], lengths: list[int], cost: Cost) -> tuple[list[int], list[int]]:
    """Two rows of like cost: longest processing time first (Graham 1969)."""
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0.0, 0.0]
    for i in sorted(row, key=lambda i: -lengths[i]):
        lighter = int(loads[1] < loads[0])
        halves[lighter].append(i)
        loads[lighter] += cost([lengths[i]])
    return halves


def _deal(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Row numbers [rows per rank, ranks]: in rounds, the costliest rows to the ranks with the least work."""
    grid = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    loads = np.zeros(ranks)
    for turn, rows in enumerate(grid):
        dealt = np.empty_like(rows)
        dealt[np.argsort(loads, kind="stable")] = rows
        grid[turn] = dealt
        loads += costs[dealt]
    return grid


def _refine(grid: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Swap rows of the busiest rank with cheaper ones of another while that lowers the larger load of the two."""
    loads = costs[grid].sum(axis=0)
    for _ in range(SWAPS_PER_RANK * grid.shape[1]):
        busiest = int(np.argmax(loads))
        for other in np.argsort(loads, kind="stable"):
            swap = _best_swap(costs[grid[:, busiest]], costs[grid[:, other]], loads[busiest] - loads[other])
            if swap:
                grid[swap[0], busiest], grid[swap[1], other] = grid[swap[1], other], grid[swap[0], busiest]
                loads = costs[grid].sum(axis=0)
                break
        else:
            break
    return grid


def _best_swap(heavy: np.ndarray, light: np.ndarray, gap: float) -> tuple[int, int] | None:
    """Positions whose exchange brings the loads closest together, or None where no exchange helps."""
    order = np.argsort(light, kind="stable")
    wanted = np.searchsorted(light[order], heavy - gap / 2)
    candidates = np.stack([np.clip(wanted + shift, 0, len(light) - 1) for shift in (-1, 0)])
    moved = heavy - light[order][candidates]
    miss = np.abs(moved - gap / 2)
    side, position = np.unravel_index(int(np.argmin(miss)), miss.shape)
    helps = gap > 0 and miss[side, position] < gap / 2 * (1 - 1e-9)
    return (int(position), int(order[candidates[side, position]])) if helps else None


def _dummy(sample: Sample, max_tokens: int) -> MicroBatch:
    """A row that trains nothing, so that every rank runs the same collectives."""
    micro = _join([sample], max_tokens)
    empty = np.zeros(len(micro.mask))
    micro.mask, micro.advantages = Array.of(empty, "bool"), Array.of(empty, "f4")
    micro.rl_weights = micro.ce_weights = micro.ref_kl_weights = micro.ref_logprobs = None
    micro.images = []
    return micro


def _length(sample: Sample, max_tokens: int) -> int:
    return whole_images(sample.images, min(len(sample.token_ids), max_tokens))[0]


def _join(samples: list[Sample], max_tokens: int) -> MicroBatch:
    """Concatenate samples, those of one adapter together and each cut to `max_tokens`; streams that only some have are
    filled with their meaning."""

    def optional(name: str, fill: float) -> Array | None:
        return None if all(getattr(sample, name) is None for sample in samples) else filled(name, fill)

    def filled(name: str, fill: float) -> Array:
        streams = [getattr(sample, name) for sample in samples]
        parts = [np.full(n, fill) if stream is None else stream.numpy()[:n]
                 for stream, n in zip(streams, lengths, strict=True)]  # fmt: skip
        return Array.of(np.concatenate(parts), "f4")

    def stream(name: str, dtype: str) -> Array:
        parts = [getattr(sample, name).numpy()[:n] for sample, n in zip(samples, lengths, strict=True)]
        return Array.of(np.concatenate(parts), dtype)

    samples = sorted(samples, key=lambda sample: sample.adapter)
    for sample in samples:
        _check_complete(sample)
    lengths = [_length(sample, max_tokens) for sample in samples]
    versions = [_comparable_versions(sample)[:n] for sample, n in zip(samples, lengths, strict=True)]
    return MicroBatch(
        token_ids=stream("token_ids", "i4"),
        mask=stream("mask", "bool"),
        logprobs=stream("logprobs", "f4"),
        versions=Array.of(np.concatenate(versions), "i8"),
        advantages=filled("advantages", 0.0),
        temperatures=Array.of(np.repeat([sample.temperature for sample in samples], lengths), "f4"),
        seq_lens=lengths,
        sources=[sample.source for sample in samples],
        adapters=[sample.adapter for sample in samples] if any(s.adapter for s in samples) else [],
        rl_weights=optional("rl_weights", 1.0),
        ce_weights=optional("ce_weights", 0.0),
        ref_kl_weights=optional("ref_kl_weights", 0.0),
        ref_logprobs=optional("ref_logprobs", 0.0),
        routed_experts=_join_routing(samples, lengths),
        images=_join_images(samples, lengths),
    )


def _join_routing(samples: list[Sample], lengths: list[int]) -> RoutedExperts | None:
    """The experts of all tokens, -1 for samples without a record; None where none has one."""
    records = [sample.routed_experts for sample in samples]
    shape = next(((record.layers, record.top_k) for record in records if record), None)
    if shape is None:
        return None
    parts = [record.numpy()[:n] if record else np.full((n, *shape), -1, dtype=np.int16)
             for record, n in zip(records, lengths, strict=True)]  # fmt: skip
    return RoutedExperts.of(np.concatenate(parts))


def _join_images(samples: list[Sample], lengths: list[int]) -> list[ImageSpan]:
    """The images of all samples, where they lie in the row."""
    starts = [0, *accumulate(lengths)]
    return [ImageSpan(start + image.start, image.length, image.digest)
            for sample, n, start in zip(samples, lengths, starts, strict=False)
            for image in whole_images(sample.images, n)[1]]  # fmt: skip


def _check_complete(sample: Sample) -> None:
    members = sample.mask.numpy() & (sample.rl_weights is None or sample.rl_weights.numpy() != 0)
    if sample.advantages is None and members.any():
        raise ValueError(f"{sample.sample_id} has tokens of the rl component and no advantages: assign them first")
    if sample.ref_logprobs is None and sample.ref_kl_weights is not None and sample.ref_kl_weights.numpy().any():
        raise ValueError(f"{sample.sample_id} has tokens of the ref_kl component and no ref_logprobs: score it first")


def _comparable_versions(sample: Sample) -> np.ndarray:
    """Versions of the tokens that the trainer may compare with its own log-probabilities, `NOT_SAMPLED` elsewhere."""
    return np.where(single_version(sample), sample.versions.numpy(), NOT_SAMPLED)
