"""Context parallelism: a packed row divided among ranks, and what they computed put together again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from prime_hpc.models.attention import Attend, open_attention
from prime_hpc.models.indexed import IndexedAttention
from prime_hpc.trainer.parallel.collectives import gather_rows, sum_over
from prime_hpc.trainer.parallel.ring import Chunks, RingAttention
from prime_hpc.trainer.parallel.ulysses import UlyssesAttention

if TYPE_CHECKING:
    from prime_hpc.trainer.row import PackedRow


@dataclass(frozen=True)
class Part:
    """What a rank computes of a row."""

    row: PackedRow
    """Its tokens, in the order of their places. `seq_lens` are those of the whole row and of its padding, which is a
    document of its own at the end."""
    before: Tensor
    """int64[m]: which of its states predict a scored token."""
    scored: Tensor
    """int64[m]: places in the whole row of the tokens that they predict."""
    real: int
    """Its tokens, from the first on, that are not padding."""


@dataclass(frozen=True)
class ContextParallel:
    """A group of ranks that divides rows; without one, every rank has whole rows."""

    group: ProcessGroup | None = None
    style: str = "ulysses"

    def divide(self, row: PackedRow) -> Part:
        """The part of this rank; every rank of the group has the same number of tokens."""
        n = len(row.token_ids)
        if self.group is None:
            return Part(row, row.scored - 1, row.scored, n)
        ranges, padding = self._ranges(n, self.group.rank())
        places = self._places(n, self.group.rank(), row.token_ids.device)
        local = torch.full((n + padding,), -1, device=places.device).index_copy(0, places, torch.arange(
            len(places), device=places.device))  # fmt: skip
        before = local[row.scored - 1]
        mine = before >= 0
        divided = replace(_take(row, places, padding), adapters=_adapters_within(row, ranges, padding))
        return Part(divided, before[mine], row.scored[mine],
                    sum(max(0, min(r.stop, n) - r.start) for r in ranges))  # fmt: skip

    def unite(self, base: Tensor, row: PackedRow, part: Part, values: Tensor) -> Tensor:
        """[n]: the `values` [m] of all ranks' scored tokens, `base` [n] elsewhere; the same on every rank."""
        own = torch.zeros_like(base).index_copy(0, part.scored, values)
        return base.index_copy(0, row.scored, sum_over(own, self.group)[row.scored])

    def open_attention(
        self, backend: str, seq_lens: list[int], device: torch.device, top_k: int | None = None
    ) -> Attend:
        """Attention of this rank's tokens within the documents of a whole row; with `top_k`, also for layers whose
        indexer chooses so many keys a query."""
        attend = self._open_whole(backend, seq_lens, device)
        if top_k is None:
            return attend
        if self.group is None:
            return IndexedAttention(attend, seq_lens, top_k, torch.arange(sum(seq_lens), device=device))
        places = torch.cat([self._places(sum(seq_lens), rank, device) for rank in range(self.group.size())])
        order, rank = places.argsort(), self.group.rank()
        gather = partial(_gather_in_order, order=order, group=self.group)
        return IndexedAttention(attend, seq_lens, top_k, places.chunk(self.group.size())[rank], gather)

    def _open_whole(self, backend: str, seq_lens: list[int], device: torch.device) -> Attend:
        if self.group is None:
            return open_attention(backend, seq_lens, device)
        if self.style == "ring":
            return RingAttention(seq_lens, self.group, device)
        return UlyssesAttention(open_attention(backend, seq_lens, device), self.group)

    def _places(self, n: int, rank: int, device: torch.device) -> Tensor:
        """int64[m]: where a rank's tokens lie in a row of `n`, padding and all."""
        return torch.cat([torch.arange(r.start, r.stop, device=device) for r in self._ranges(n, rank)[0]])

    def _ranges(self, n: int, rank: int) -> tuple[list[range], int]:
        """Places of a rank's tokens, and by how many tokens a row of `n` is padded so that all have as many."""
        ranks = self.group.size()
        chunks = 2 * ranks if self.style == "ring" else ranks
        size = -(-n // chunks)
        mine = Chunks([n], ranks).of(rank) if self.style == "ring" else (rank,)
        return [range(i * size, (i + 1) * size) for i in mine], size * chunks - n


def _gather_in_order(x: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
    return gather_rows(x, group).index_select(0, order)


def _adapters_within(row: PackedRow, ranges: list[range], padding: int) -> dict[str, int]:
    """Tokens of each adapter among those of some places; padding is the last one's."""
    counts, begin = {}, 0
    for adapter, n in row.adapters.items():
        last = begin + n == len(row.token_ids)
        end = begin + n + padding * last
        counts[adapter] = sum(len(range(max(begin, r.start), min(end, r.stop))) for r in ranges)
        begin = end
    return counts


def _take(row: PackedRow, places: Tensor, padding: int) -> PackedRow:
    tail = torch.arange(padding, device=places.device)
    replay = None if row.replay is None else pad(row.replay, (0, 0, 0, padding), value=-1)[:, places]
    return replace(
        row,
        token_ids=pad(row.token_ids, (0, padding))[places],
        position_ids=torch.cat([row.position_ids, tail])[places],
        seq_lens=[*row.seq_lens, padding] if padding else row.seq_lens,
        replay=replay,
    )
