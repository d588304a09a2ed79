"""One FP8 product for each expert, with a scale for every row of what is multiplied: the output, and the gradient of
the rows. Gradients of the matrices are computed in bfloat16, since they would need scales along the tokens, which cost
more than such a product gains."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from prime_hpc.models.grouped import local_groups

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
MULTIPLE = 16
"""Rows of every group and sizes of its matrix are multiples of this: the kernel reads whole 16 bytes."""

Size = TypeVar("Size", int, Tensor)
Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows sorted by group, and rows of each group, to rows."""
Scaled = tuple[Tensor, Tensor]
"""FP8 numbers [..., k], each row contiguous, and float32[...] to multiply the rows with."""


@dataclass(frozen=True)
class Padding:
    """Rows of zeros behind the rows of every group, after which none is empty and all are whole multiples."""

    places: Tensor
    """int64[m]: place of each row among the padded ones."""
    sources: Tensor
    """int64[p]: the row at each padded place; m stands for zeros."""
    counts: Tensor
    """int64[groups]: padded rows of each."""

    @classmethod
    def of(cls, counts: Tensor, rows: int) -> "Padding":
        """For the counts int64[groups] of so many rows. How many there are after it does not depend on the counts, so
        that nothing waits for the device; the last group has what is left."""
        total = _round_up(rows) + MULTIPLE * len(counts)
        padded = _round_up(counts.clamp(min=1))
        starts, ends = padded.cumsum(0) - padded, counts.cumsum(0)
        index = torch.arange(rows, device=counts.device)
        places = index + (starts - ends + counts)[torch.searchsorted(ends, index, right=True)]
        sources = torch.full((total,), rows, device=counts.device).scatter_(0, places, index)
        return cls(places, sources, torch.cat([padded[:-1], total - starts[-1:]]))

    def add(self, rows: Tensor) -> Tensor:
        """[m, h] to [p, h]."""
        return _Add.apply(rows, self.sources, self.places)

    def remove(self, rows: Tensor) -> Tensor:
        """[p, h] to [m, h]."""
        return _Remove.apply(rows, self.sources, self.places)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return _select(rows, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class _Remove(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (sources,) = ctx.saved_tensors
        return _select(grad, sources), None, None


def compute_padded(compute: Compute, rows: Tensor, counts: Tensor) -> Tensor:
    """`compute`, which keeps rows of zeros, by groups as `scaled_grouped_matmul` takes them."""
    padding = Padding.of(counts, len(rows))
    return padding.remove(compute(padding.add(rows), padding.counts))


def scaled_grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`grouped_matmul` for padded groups of rows."""
    return _ScaledProduct.apply(rows, local_groups(weights), counts.cumsum(0, dtype=torch.int32))


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return multiply(quantise(rows), quantise(weights), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, ends = ctx.saved_tensors
        grad_rows = multiply(quantise(grad), quantise(weights.transpose(-2, -1)), ends)
        return grad_rows, grouped_mm(grad.T, rows, offs=ends), None


def quantise(x: Tensor) -> Scaled:
    """The rows of `x` [..., k], in one kernel on a GPU, where the steps one by one would pass over memory for each."""
    if torch.compiler.is_compiling() or not x.is_cuda:
        return _quantise(x)
    return _compiled_quantise()(x.detach())  # one graph, whether there will be a gradient or not


def _quantise(x: Tensor) -> Scaled:
    largest = x.abs().amax(-1, keepdim=True).float()
    scales = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scales).to(FP8).contiguous(), scales.squeeze(-1)


@cache
def _compiled_quantise() -> Callable[[Tensor], Scaled]:
    """Made at the first use: the compiler takes seconds to load, also in a trainer that has no use for it."""
    return torch.compile(_quantise, dynamic=True)


def multiply(rows: Scaled, weights: Scaled, ends: Tensor) -> Tensor:
    """Products [p, n] in bfloat16 of the rows [p, k] with those of their group's matrix [groups, n, k].

    Args:
        ends: int32[groups], the end of each group.
    """
    (a, a_scales), (b, b_scales) = rows, weights
    return scaled_grouped_mm(a, b.transpose(-2, -1), a_scales, b_scales, ends)


@torch.library.custom_op("prime_hpc::scaled_grouped_mm", mutates_args=(), device_types="cuda")
def scaled_grouped_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, ends: Tensor) -> Tensor:
    """torch._scaled_grouped_mm, as an operator for which the compiler leaves operands as they lie."""
    return torch._scaled_grouped_mm(a, b, a_scales, b_scales, offs=ends, use_fast_accum=True)


@scaled_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, ends: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(a, b, a_scales, b_scales, offs=ends, use_fast_accum=True)


@scaled_grouped_mm.register_kernel("cpu")
def _(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, ends: Tensor) -> Tensor:
    """The same from products in bfloat16, which holds FP8 numbers as they are."""
    group = torch.searchsorted(ends, torch.arange(len(a), dtype=ends.dtype), right=True)
    products = grouped_mm(a.bfloat16(), b.bfloat16(), offs=ends).float()
    return (products * a_scales[:, None] * b_scales[group]).bfloat16()


def _select(rows: Tensor, sources: Tensor) -> Tensor:
    """Rows, and zeros for what is behind the last."""
    return pad(rows, (0, 0, 0, 1)).index_select(0, sources)


def _round_up(size: Size) -> Size:
    return (size + MULTIPLE - 1) // MULTIPLE * MULTIPLE
