"""Context parallelism by a ring (Liu et al. 2023, arXiv 2310.01889): keys and values pass from rank to rank, and each
rank joins what its queries found in every part by the parts' log-normalisers.

A row is cut into 2 * ranks chunks, of which rank r has chunks r and 2 * ranks - 1 - r (zig-zag), so that causal
attention costs every rank the same. As a document is contiguous, at most one has tokens in two different chunks: there,
queries at the head of the later chunk see all keys at the tail of the earlier one. So attention between documents is
never computed, and nothing is masked but the future within a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from prime_hpc.trainer.parallel.blocks import Block, attend_block, attend_block_backward


@dataclass(frozen=True)
class Chunks:
    """The zig-zag cut of a row of documents for `ranks` ranks; the row's length is a multiple of 2 * ranks. With a
    `window`, a token sees so many, itself the last."""

    seq_lens: list[int]
    ranks: int
    window: int | None = None

    @property
    def size(self) -> int:
        return sum(self.seq_lens) // (2 * self.ranks)

    def of(self, rank: int) -> tuple[int, int]:
        """Numbers of a rank's chunks, in the order of its tokens."""
        return rank, 2 * self.ranks - 1 - rank

    def documents(self) -> Iterator[tuple[int, int]]:
        """Begin and end of every document."""
        bounds = [0]
        for n in self.seq_lens:
            bounds.append(bounds[-1] + n)
        return pairwise(bounds)

    def own_block(self, rank: int) -> Block:
        """A rank's tokens among themselves within each chunk: the pieces of documents that it has."""
        lengths = [min(end, low + self.size) - max(begin, low)
                   for low in (chunk * self.size for chunk in self.of(rank))
                   for begin, end in self.documents() if begin < low + self.size and end > low]  # fmt: skip
        everything = slice(0, 2 * self.size)
        return Block(everything, everything, lengths, causal=True,
                     reach=None if self.window is None else self.window - 1)  # fmt: skip

    def blocks(self, rank: int, other: int) -> Iterator[Block]:
        """What the tokens of `rank` see of those of `other` in chunks before theirs."""
        for i, late in enumerate(self.of(rank)):
            for j, early in enumerate(self.of(other)):
                if early < late:
                    yield from self._straddling(late, i * self.size, early, j * self.size)

    def _straddling(self, late: int, query_place: int, early: int, key_place: int) -> Iterator[Block]:
        """The document that has the last token of one chunk and the first of another, which begin at these places."""
        last, first = (early + 1) * self.size - 1, late * self.size
        begin, end = next((b, e) for b, e in self.documents() if b <= last < e)
        seen, seeing, reach = min(last + 1 - begin, self.size), min(end - first, self.size), None
        if self.window is not None:
            # the last key is first - last tokens before the first query
            far = self.window - (first - last)
            seen, seeing = min(seen, far), min(seeing, far)
            reach = far - seeing
        if seeing > 0:
            keys = slice(key_place + self.size - seen, key_place + self.size)
            yield Block(slice(query_place, query_place + seeing), keys, None, causal=False, reach=reach)


class RingAttention:
    """As `Attend`, for the tokens of this rank. `seq_lens` are those of the whole row."""

    def __init__(self, seq_lens: list[int], group: ProcessGroup, device: torch.device):
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self._seq_lens, self._device = seq_lens, device
        self._plans: dict[int | None, list[list[Block]]] = {}

    @torch.compiler.disable
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        if window not in self._plans:
            self._plans[window] = self._plan(Chunks(self._seq_lens, self.ranks, window))
        return _Ring.apply(query, key, value, scale, self, self._plans[window])

    def _plan(self, chunks: Chunks) -> list[list[Block]]:
        """What this rank computes with the keys and values of each turn."""
        plan = [list(chunks.blocks(self.rank, (self.rank - turn) % self.ranks)) for turn in range(self.ranks)]
        plan[0].insert(0, chunks.own_block(self.rank))
        for blocks in plan:
            for block in blocks:
                block.place(self._device)
        return plan

    def pass_on(self, x: Tensor) -> "Passing":
        """Send `x` to the next rank and begin to receive that of the one before."""
        received, sent = ([len(x) if rank == peer % self.ranks else 0 for rank in range(self.ranks)]
                          for peer in (self.rank - 1, self.rank + 1))  # fmt: skip
        arriving = torch.empty_like(x)
        work = dist.all_to_all_single(arriving, x, received, sent, self.group, async_op=True)
        return Passing(arriving, work, x)


@dataclass
class Passing:
    """A tensor on its way. `departing` must live until it has left."""

    arriving: Tensor
    work: Any
    departing: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.arriving


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, ring: RingAttention, plan: list[list[Block]]
    ) -> Tensor:
        parts, output, normaliser = torch.stack([key, value]), None, None
        for turn, blocks in enumerate(plan):
            passing = ring.pass_on(parts) if turn < ring.ranks - 1 else None
            for block in blocks:
                found, weight = attend_block(query[block.queries], *parts[:, block.keys], block, scale)
                if output is None:
                    output, normaliser = found.to(weight.dtype), weight
                else:
                    _join(output[block.queries], normaliser[block.queries], found, weight)
            parts = passing.wait() if passing else parts
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.scale, ctx.ring, ctx.plan = scale, ring, plan
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values travel with them, and one step further, home."""
        query, key, value, output, normaliser = ctx.saved_tensors
        ring, plan, parts, grad = ctx.ring, ctx.plan, torch.stack([key, value]), grad.contiguous()
        grad_query = torch.zeros_like(query, dtype=normaliser.dtype)
        grad_parts = torch.zeros_like(parts, dtype=normaliser.dtype)
        for turn, blocks in enumerate(plan):
            passing = ring.pass_on(parts) if turn < ring.ranks - 1 else None
            for block in blocks:
                rows = block.queries
                found = attend_block_backward(grad[rows], query[rows], *parts[:, block.keys], output[rows],
                                              normaliser[rows], block, ctx.scale)  # fmt: skip
                grad_query[rows] += found[0]
                grad_parts[0, block.keys] += found[1]
                grad_parts[1, block.keys] += found[2]
            grad_parts = ring.pass_on(grad_parts).wait()
            parts = passing.wait() if passing else parts
        return grad_query.to(query.dtype), *grad_parts.to(key.dtype), None, None, None


def _join(output: Tensor, normaliser: Tensor, found: Tensor, weight: Tensor) -> None:
    """Add to the attention of some queries, in place, what they found in another part.

    Args:
        output: [m, heads, d], over the keys so far; found: over those of the part.
        normaliser: [m, heads], logarithm of the sum of exponentials over the keys so far; weight: over the part's.
    """
    total = torch.logaddexp(normaliser, weight)
    output.mul_((normaliser - total).exp()[..., None]).add_(found * (weight - total).exp()[..., None])
    normaliser.copy_(total)
