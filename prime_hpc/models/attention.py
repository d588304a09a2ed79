"""Causal attention over packed documents that never see each other, by whichever kernel the hardware has.

A model is handed an `Attend` and knows nothing of documents, devices or kernels.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models import varlen

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""(query, key, value, bounds of the documents, longest document, scale, window) to output."""
SDPA = "sdpa"


class Attend(Protocol):
    """Causal attention of n tokens, in which every token sees its own sequence only."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """Attend.

        Args:
            query: [n, heads, d].
            key: [n, kv_heads, d], each head shared by heads / kv_heads query heads; value: [n, kv_heads, d_v].
            scale: factor on the products of query and key.
            window: the last tokens that a token sees, itself among them; all where there is none.

        Returns:
            [n, heads, d_v].
        """


class BlockDiagonalAttention:
    """The fallback for every device and dtype: one call of torch's attention for all documents of a length, so that
    nothing is padded or masked. Left out of compiled graphs, which each new number of lengths would make anew."""

    def __init__(self, seq_lens: list[int], device: torch.device):
        lengths = torch.tensor(seq_lens)
        starts = lengths.cumsum(0) - lengths
        places = [starts[lengths == n, None] + torch.arange(n) for n in sorted(set(seq_lens))]
        self._groups = [place.to(device) for place in places]
        self._restore = torch.cat([place.flatten() for place in places]).argsort().to(device)

    @torch.compiler.disable
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        parts = []
        for places in self._groups:
            q, k, v = (_pick(x, places).transpose(1, 2) for x in (query, key, value))
            n = places.shape[1]
            mask = None if window is None or window >= n else _band(n, window, places.device)
            part = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, self._restore)


class VarlenAttention:
    """One call of a kernel that takes the bounds of the documents."""

    def __init__(self, seq_lens: list[int], device: torch.device, kernel: Kernel):
        self._bounds = torch.tensor([0, *seq_lens]).cumsum(0).to(device, torch.int32)
        torch._dynamo.maybe_mark_dynamic(self._bounds, 0)
        self._longest = torch.tensor(max(seq_lens))
        self._kernel = kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        return self._kernel(query, key, value, self._bounds, self._longest, scale, window)


class CachedAttention:
    """Attention of b sequences that grow step by step, for sampling; keeps the keys and values of every layer.

    The layers call it in their order, each once a step, with the t new tokens of all sequences as n = b * t.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, mask: Tensor) -> None:
        """Start a step.

        Args:
            mask: int64[b, kept + t], 0 on padding (to the left).
        """
        kept = self._kept[0][0].shape[2] if self._kept else 0
        places = torch.arange(mask.shape[1], device=mask.device)
        new = places[kept:, None]
        # padding sees itself, since a softmax over nothing is not a number
        self._visible = ((places <= new) & mask.bool()[:, None]) | (places == new)
        self._distance = new - places
        self._layer = 0

    @torch.compiler.disable
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        q, k, v = (x.unflatten(0, (len(self._visible), -1)).transpose(1, 2) for x in (query, key, value))
        if self._layer in self._kept:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self._kept[self._layer], (k, v), strict=True))
        self._kept[self._layer] = k, v
        self._layer += 1
        visible = self._visible if window is None else self._visible & (self._distance < window)
        output = scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=scale, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class _Varlen:
    """A kernel for half precision: where it is imported from, and the major compute capabilities that it runs on."""

    module: str
    majors: tuple[int, ...]
    load: Callable[[], Kernel]


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend for `trainer.attn`; `auto` takes the fastest that the device, the dtype and what is installed allow.

    Raises:
        ConfigurationError: the wanted backend cannot run here; says why.
    """
    if wanted == "auto":
        return next((name for name in _VARLEN if _obstacle(name, device, dtype) is None), SDPA)
    obstacle = None if wanted == SDPA else _obstacle(wanted, device, dtype)
    if obstacle:
        raise ConfigurationError([ConfigProblem("trainer.attn", wanted, f"auto or sdpa, since {wanted} {obstacle}")])
    return wanted


def open_attention(backend: str, seq_lens: list[int], device: torch.device) -> Attend:
    """Attention by `backend` over a row of documents of these lengths."""
    if backend == SDPA:
        return BlockDiagonalAttention(seq_lens, device)
    return VarlenAttention(seq_lens, device, _load_kernel(backend))


def _obstacle(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    kernel = _VARLEN.get(name)
    if kernel is None:
        return "is no packed attention"
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"needs half precision on a GPU, not {str(dtype).removeprefix('torch.')} on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in kernel.majors:
        return f"does not run on compute capability {major}.{minor}"
    if not _is_installed(kernel.module):
        return f"needs the module {kernel.module}, which is not installed"
    return None


def _is_installed(module: str) -> bool:
    parents = module.split(".")[:-1]
    nested = (".".join(parents[: i + 1]) for i in range(len(parents)))
    return all(importlib.util.find_spec(name) is not None for name in (*nested, module))


@cache
def _load_kernel(name: str) -> Kernel:
    return _VARLEN[name].load()


def _packed_kernel(name: str) -> Kernel:
    """A kernel of ours by its name: part of compiled graphs."""
    varlen.load(name)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: Tensor, scale: float, window: int | None
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return varlen.packed_attention(q, k, v, bounds, longest, scale, window, name)[0]

    return attend


def _flash_kernel(module: str) -> Kernel:
    """Versions 2 and 3 agree on these keywords; some also return the log-normaliser."""
    function: Callable[..., Any] = importlib.import_module(module).flash_attn_varlen_func

    @torch.compiler.disable
    def attend(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: Tensor, scale: float, window: int | None
    ) -> Tensor:
        sides = (-1, -1) if window is None else (window - 1, 0)
        return _first(function(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=int(longest),
                               max_seqlen_k=int(longest), softmax_scale=scale, causal=True,
                               window_size=sides))  # fmt: skip

    return attend


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _band(n: int, window: int, device: torch.device) -> Tensor:
    """bool[n, n]: whether a token sees another."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril().triu(1 - window)


def _pick(x: Tensor, places: Tensor) -> Tensor:
    """x[places]; its backward adds rows at known places, where that of an index would sort them."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape)


def _flash(module: str, *majors: int) -> _Varlen:
    return _Varlen(module, majors, lambda: _flash_kernel(module))


def _packed(name: str, module: str, *majors: int) -> _Varlen:
    return _Varlen(module, majors, lambda: _packed_kernel(name))


_VARLEN = {
    "flash_attention_3": _flash("flash_attn_interface", 9),
    "flash_attention_4": _packed("flash_attention_4", "flash_attn.cute", 9, 10, 11),
    "flash_attention_2": _flash("flash_attn.flash_attn_interface", 8, 9, 10, 12),
    "varlen": _packed("varlen", "torch", 8, 9, 10, 12),
}
"""From fastest to slowest where several run on a device. Version 3 is written for Hopper and leads there."""
