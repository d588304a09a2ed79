"""Collectives with a gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Rows of `x` to the ranks of `group`, the first `sent[0]` of them to the first; returns `received[i]` rows of each
    rank i, in order. Gradients go back the way the rows came.

    Args:
        x: [sum(sent), ...].

    Returns:
        [sum(received), ...].
    """
    return _AllToAll.apply(x, received, sent, group)


def gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks * m, ...]: the rows [m, ...] of all ranks, in their order. The gradient of a row is the sum of what all
    ranks make of it."""
    return _GatherRows.apply(x, group)


def sum_over(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of `x` over the ranks of a group, for a loss that each of them computes alike from it: the gradient of
    every term is that of the sum. Without a group, `x`."""
    return x if group is None else _SumOver.apply(x, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
        ctx.arguments = sent, received, group
        return _exchange(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, *ctx.arguments), None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def _exchange(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(output, x.contiguous(), received, sent, group)
    return output
