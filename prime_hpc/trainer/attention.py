"""Packed attention for models of transformers: which implementation they run, and what their forward must be told."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from prime_hpc.models.attention import SDPA, Attend
from prime_hpc.models.traits import has_windows

DOCUMENTS = "prime_documents"
"""Name among the implementations of transformers of attention that goes through an `Attend`."""


def choose_implementation(backend: str, config: PreTrainedConfig) -> str:
    """The implementation of transformers for an attention backend: ours where the model allows.

    Models with sliding windows keep the implementation of transformers, which masks documents by their positions.
    """
    if not has_windows(config.to_dict()):
        return DOCUMENTS if backend != "eager" else backend
    return backend if backend.startswith("flash") or backend == "eager" else SDPA


def row_arguments(
    implementation: str,
    open_attend: Callable[[list[int], torch.device], Attend],
    seq_lens: list[int],
    device: torch.device,
) -> dict[str, Any]:
    """Keyword arguments that tell a model's forward about a row of documents of these lengths.

    Ours takes an `Attend`, the flash-attention of transformers the bounds of the documents. The others find the
    documents from positions that restart.
    """
    if implementation == DOCUMENTS:
        return {"attend": open_attend(seq_lens, device)}
    if implementation in ("eager", SDPA):
        return {}
    bounds, longest = torch.tensor([0, *seq_lens]).cumsum(0).to(device, torch.int32), max(seq_lens)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def document_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attend: Attend,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        query: [1, heads, n, d].
        key: [1, kv_heads, n, d]; value alike.

    Returns:
        [1, n, heads, d] and no attention weights.

    Raises:
        NotImplementedError: the model wants a soft cap, sinks or a mask.
    """
    if attention_mask is not None or any(others.get(key) is not None for key in ("softcap", "s_aux")):
        raise NotImplementedError("attention with a soft cap, sinks or a mask: set trainer.attn=eager")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(query, key, value, scaling, sliding_window)[None], None


AttentionInterface.register(DOCUMENTS, document_attention)
