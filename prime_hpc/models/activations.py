"""Bytes that the decoder keeps from the forward for the backward pass, from the dictionary of a config.json alone.

The counts follow what autograd saves in `layers.py`, `moe.py` and the blocks of transformers: the inputs of matrices,
of norms, of the attention kernel and of the gate. Compiled, the gate's activation is computed anew.
"""

from typing import Literal

from prime_hpc.models.spec import HFConfig, Widths, layer_widths

NormKernel = Literal["fused", "composite", "hf"]
"""fused: one kernel, keeps its input (CUDA, and whatever is compiled). composite: keeps the input and the normalised
states in float32 (native blocks on a CPU). hf: the same in float32 and in the model's dtype (transformers)."""

FLOAT32 = INT32 = 4


def kept_bytes(hf_config: HFConfig, dtype_bytes: int, norm: NormKernel, *, joined: bool, split: int = 1,
               compiled: bool = False, chosen: bool = False) -> list[int]:  # fmt: skip
    """Bytes of each layer for one token.

    Args:
        dtype_bytes: of the computation.
        joined: attention runs document by document, so that its output exists in parts and joined.
        split: ranks that share heads and channels of MLPs (tensor parallelism); the residual stream is whole on each.
        chosen: indexers choose among the keys, as a document is longer than their choice.
    """
    gated, layers = 3 if compiled else 4, layer_widths(hf_config, chosen=chosen)
    return [_layer(widths, dtype_bytes, norm, joined and not chosen, split, gated) + INT32 * widths.choice
            for widths in layers]  # fmt: skip


def input_bytes(hf_config: HFConfig, dtype_bytes: int, *, chosen: bool = False) -> list[int]:
    """Bytes of each layer for one token where the layer is computed anew in the backward pass: its input, and keys that
    it chose for the next layer, too."""
    layers = layer_widths(hf_config, chosen=chosen)
    return [widths.hidden * dtype_bytes + INT32 * widths.shared_choice for widths in layers]


def product_bytes(hf_config: HFConfig, dtype_bytes: int, *, split: int = 1, compiled: bool = False,
                  chosen: bool = False) -> list[int]:  # fmt: skip
    """Bytes of each layer for one token where its input and the outputs of its products and of attention are kept, and
    all else is computed anew. Compiled, the last product of a dense block is left out, as no gradient needs it."""
    layers = layer_widths(hf_config, chosen=chosen)
    return [dtype_bytes * _products(widths, split, compiled) + INT32 * widths.choice for widths in layers]


def score_bytes(heads: int, keys: int, dtype_bytes: int, *, split: int = 1) -> int:
    """Bytes of a layer for one token where attention keeps its scores of `keys` keys: in float32, of which their
    softmax is taken, and in the dtype of the computation where that is another."""
    return heads // split * keys * (FLOAT32 + dtype_bytes * (dtype_bytes < FLOAT32))


def backward_bytes(hf_config: HFConfig, dtype_bytes: int, *, split: int = 1, compiled: bool = False) -> list[int]:
    """Bytes of each layer for one token that its backward pass has at its widest beside what was kept: gradients around
    the gate, and of what experts gave, which are float32 until they are cast where nothing fuses the two."""
    pair = 2 * (dtype_bytes if compiled else FLOAT32)
    return [dtype_bytes * (2 * widths.hidden + 2 * widths.feed_forward // split) + pair * widths.routed * widths.hidden
            for widths in layer_widths(hf_config)]  # fmt: skip


def _products(widths: Widths, split: int, compiled: bool) -> int:
    last = widths.routed or (0 if compiled else 1)
    attention = widths.query + widths.key + widths.value + widths.latent + widths.out + widths.gate + widths.absorbed
    return (2 + last) * widths.hidden + (attention + 2 * widths.feed_forward) // split


def _layer(widths: Widths, dtype_bytes: int, norm: NormKernel, joined: bool, split: int, gated: int) -> int:
    heads = widths.query + widths.key
    normed = widths.norms * widths.hidden + heads * widths.norms_vectors + heads * widths.norms_heads // split
    attention = (
        widths.query + widths.key + widths.value + widths.latent + widths.out * (2 if joined else 1) + widths.absorbed
    )
    attention += 2 * widths.gate  # what it multiplies is counted, the gate and the product are not
    channels = 2 * widths.hidden + (attention + gated * widths.feed_forward) // split
    # rows sent to the experts, and what came back before it is weighted
    channels += 2 * widths.routed * widths.hidden
    router = FLOAT32 * widths.hidden if widths.routed and dtype_bytes < FLOAT32 else 0
    channels += widths.mixed // split
    norms = max(norm_bytes(norm, dtype_bytes), FLOAT32 if widths.norms_in_single else 0)
    return channels * dtype_bytes + normed * norms + router + FLOAT32 * widths.single // split


def norm_bytes(norm: NormKernel, dtype_bytes: int) -> int:
    """Bytes that a norm keeps for each of its channels, beside its output."""
    return {"fused": dtype_bytes, "composite": 2 * FLOAT32, "hf": FLOAT32 + dtype_bytes}[norm]
