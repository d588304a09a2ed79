"""Tokens to experts and back, and one matrix product for each expert."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import grouped_mm


@dataclass(frozen=True)
class Dispatch:
    """The order that puts the n * k pairs of token and chosen expert together by expert."""

    order: Tensor
    """int64[n * k]: pair at each sorted place; pair p belongs to token p // k."""
    inverse: Tensor
    """int64[n * k]: sorted place of each pair."""
    counts: Tensor
    """int64[experts]: pairs of each."""
    top_k: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> "Dispatch":
        """From the chosen experts int64[n, k]; pairs of one expert stay in the order of their tokens."""
        order = chosen.flatten().argsort(stable=True)
        return cls(order, invert(order), count_tokens(chosen, experts), chosen.shape[1])

    def scatter(self, x: Tensor) -> Tensor:
        """[n, h] to [n * k, h], sorted by expert."""
        return _Scatter.apply(x, self.order, self.inverse, self.top_k)

    def gather(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[n * k, h] sorted by expert to [n, h]: the sum over a token's experts, weighted by [n, k], in float32."""
        pairs = _Unsort.apply(rows, self.order, self.inverse).unflatten(0, weights.shape)
        return (pairs * weights[..., None]).sum(1).to(rows.dtype)


class _Scatter(torch.autograd.Function):
    """Copies of rows in sorted order. Its backward pass sums a token's copies in a fixed order, where that of an
    index would add them by atomics, in another order each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Unsort(torch.autograd.Function):
    """Sorted rows in the order of their pairs. As places are unique, its backward pass is a selection too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


def invert(order: Tensor) -> Tensor:
    """int64[m]: the permutation that undoes `order`; by one write each, where sorting it would take many passes."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def count_tokens(chosen: Tensor, experts: int) -> Tensor:
    """int64[experts]: how often each is chosen. Unlike bincount it does not wait for the device."""
    flat = chosen.flatten()
    return flat.new_zeros(experts).index_add_(0, flat, torch.ones_like(flat))


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Every row times the transposed matrix of its group.

    Args:
        rows: [m, k], sorted by group.
        weights: [groups, n, k]; of a tensor that is divided by group, this rank's groups.
        counts: int64[groups], rows of each group; their sum is m.

    Returns:
        [m, n].
    """
    weights = local_groups(weights)
    multiply = multiply_by_kernel if _has_kernel(rows, weights) else multiply_by_loop
    return multiply(rows, weights, counts)


def local_groups(weights: Tensor) -> Tensor:
    """This rank's groups."""
    return weights.to_local() if isinstance(weights, DTensor) else weights


def multiply_by_kernel(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`grouped_matmul` in one kernel, without waiting for the counts."""
    return grouped_mm(rows, weights.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))


def multiply_by_loop(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`grouped_matmul` for any device and dtype."""
    groups = zip(rows.split(counts.tolist()), weights.unbind(), strict=True)
    return torch.cat([part @ weight.T for part, weight in groups])


def _has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Half precision on a GPU, and rows of whole 16 bytes on both sides."""
    if not rows.is_cuda or not len(rows) or rows.dtype != torch.bfloat16 or any(size % 8 for size in weights.shape[1:]):
        return False
    return torch.cuda.get_device_capability(rows.device) >= (8, 0)
