"""Which activations of a block its backward pass finds, and which it computes anew."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_hpc.models import grouped_fp8, indexed, varlen  # noqa: F401 (register operators)

aten = torch.ops.aten
KEPT = {
    torch.ops.prime_hpc.packed_attention.default,
    torch.ops.prime_hpc.choose_keys.default,
    torch.ops.prime_hpc.attend_to_chosen.default,
    torch.ops.prime_hpc.scaled_grouped_mm.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
"""What selective checkpointing keeps: the outputs of matrix products and of attention, where nearly all time goes.
Norms, rotations, activations and casts are computed anew."""


def checkpoint_block(block: nn.Module, mode: str) -> None:
    """Make `block` recompute everything (`full`), all but `KEPT` (`selective`), or nothing (`none`)."""
    contexts: dict[str, Callable[[], Any]] = {}
    if mode == "none":
        return
    if mode == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _decide)
    # nothing in a block is random
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts)


def _decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
