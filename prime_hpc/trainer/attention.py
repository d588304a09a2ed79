"""Causal attention over a packed row in which no document sees another, at the cost of the documents alone."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

DOCUMENTS = "prime_documents"
"""Name of this implementation among those of transformers."""


def choose(attn: str, config: PreTrainedConfig) -> str:
    """The attention implementation for `trainer.attn`: `sdpa` becomes attention by document where the model allows.

    Models with sliding windows keep the implementation of transformers, which masks documents by their positions.
    """
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    return DOCUMENTS if attn == "sdpa" and not sliding else attn


def row_arguments(attn: str, seq_lens: list[int], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments that tell a model's forward about a row of documents of these lengths.

    The flash-attention implementations of transformers, and `document_attention` in half precision on a GPU, take
    the documents' bounds; `document_attention` elsewhere the row indices [documents, length] of the documents of each
    length. The others find the documents from positions that restart.
    """
    if attn in ("eager", "sdpa"):
        return {}
    ends = torch.tensor([0, *seq_lens]).cumsum(0)
    if attn == DOCUMENTS and not _has_varlen(device, dtype):
        return {"document_groups": _group_by_length(ends[:-1], seq_lens, device)}
    bounds, longest = ends.to(device, torch.int32), max(seq_lens)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def document_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    document_groups: list[Tensor] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        query: [1, heads, n, d].
        key: [1, kv_heads, n, d]; value alike.

    Returns:
        [1, n, heads, d] and no attention weights.

    Raises:
        NotImplementedError: the model wants a soft cap or sinks.
    """
    if others.get("softcap") is not None or others.get("s_aux") is not None:
        raise NotImplementedError("attention with a soft cap or sinks: set trainer.attn=eager")
    if document_groups is None:
        repeats = query.shape[1] // key.shape[1]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        output = varlen_attn(q.contiguous(), k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
                             scale=scaling, window_size=(-1, 0))  # fmt: skip
        return output[None], None
    return _attend_by_group(query[0], key[0], value[0], scaling, document_groups)[None], None


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _attend_by_group(query: Tensor, key: Tensor, value: Tensor, scaling: float, groups: list[Tensor]) -> Tensor:
    """[heads, n, d] to [n, heads, d]: one call for all documents of a length, so that nothing is padded or masked."""
    parts = []
    for index in groups:
        q, k, v = (x[:, index].transpose(0, 1) for x in (query, key, value))
        part = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(part.transpose(1, 2).flatten(0, 1))
    packed = torch.cat(parts)
    order = torch.cat([index.flatten() for index in groups])
    return torch.empty_like(packed).index_copy(0, order, packed)


def _group_by_length(starts: Tensor, seq_lens: list[int], device: torch.device) -> list[Tensor]:
    lengths = torch.tensor(seq_lens)
    return [(starts[lengths == n, None] + torch.arange(n)).to(device) for n in sorted(set(seq_lens))]


AttentionInterface.register(DOCUMENTS, document_attention)
