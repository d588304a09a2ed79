"""Packed attention as an operator of torch: opaque to the compiler, so that no graph breaks at it, and known by name to
whoever decides which activations are kept."""

import importlib
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class VarlenKernel(Protocol):
    """Causal attention of n tokens within documents; `bounds` int32[documents + 1] are their ends, 0 first. With a
    `window`, a token sees so many, itself the last.

    What goes in and comes out is contiguous.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """[n, heads, d_v], and the log-normalisers float32[heads, n]."""

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], bounds: Tensor, longest: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `saved` are these three, the output and the log-normalisers."""


class TorchFlash:
    """What torch has built in (version 2 of FlashAttention)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        results = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=scale, **_sides(window)
        )
        return results[0], results[1]

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], bounds: Tensor, longest: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, output, normaliser = saved
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, output, normaliser, bounds, bounds, longest, longest, 0.0, True, *no_dropout, scale=scale,
            **_sides(window),
        )  # fmt: skip


class FlashAttention4:
    """flash-attn-4, written in CuTe; its kernels are compiled when they are first used."""

    def __init__(self) -> None:
        self._interface: Any = importlib.import_module("flash_attn.cute.interface")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        output, normaliser, *_ = self._interface._flash_attn_fwd(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=scale, causal=True, return_lse=True, **_sides(window),
        )  # fmt: skip
        return output, normaliser

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], bounds: Tensor, longest: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, output, normaliser = saved
        return self._interface._flash_attn_bwd(
            q, k, v, output, grad, normaliser, softmax_scale=scale, causal=True, cu_seqlens_q=bounds,
            cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest, **_sides(window),
        )  # fmt: skip


def _sides(window: int | None) -> dict[str, int]:
    """Tokens before and after its own place that a token sees, where that is limited."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


KERNELS: dict[str, type[VarlenKernel]] = {"flash_attention_4": FlashAttention4, "varlen": TorchFlash}
"""By their names in `trainer.attn`."""


@cache
def load(name: str) -> VarlenKernel:
    """The kernel of this name."""
    return KERNELS[name]()


@torch.library.custom_op("prime_hpc::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: Tensor, scale: float, window: int | None, kernel: str
) -> tuple[Tensor, Tensor]:
    """`VarlenKernel.forward` of the kernel of this name, with a gradient.

    `longest` int64[] lies on the host, as a number would be compiled into the graph.
    """
    return load(kernel).forward(q, k, v, bounds, int(longest), scale, window)


@torch.library.custom_op("prime_hpc::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    normaliser: Tensor,
    bounds: Tensor,
    longest: Tensor,
    scale: float,
    window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`VarlenKernel.backward` of the kernel of this name."""
    return load(kernel).backward(grad, (q, k, v, output, normaliser), bounds, int(longest), scale, window)


@packed_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: Tensor, scale: float, window: int | None, kernel: str
) -> tuple[Tensor, Tensor]:
    n, heads, _ = q.shape
    return q.new_empty(n, heads, v.shape[-1]), q.new_empty(heads, n, dtype=torch.float32)


@packed_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.kernel = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _differentiate(ctx: Any, grad: Tensor, _normaliser_grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = packed_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window, ctx.kernel)
    return *grads, None, None, None, None, None


packed_attention.register_autograd(_differentiate, setup_context=_keep)
