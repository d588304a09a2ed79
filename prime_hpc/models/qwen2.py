"""Qwen2 and Qwen2.5 (arXiv 2407.10671, section 2.2): grouped-query attention, biases on queries, keys and values."""

from transformers import Qwen2Config

from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block, SwiGLU, window_of


def build_block(config: Qwen2Config, layer: int) -> Block:
    """Layers differ in their windows, if any."""
    mlp = SwiGLU(config.hidden_size, config.intermediate_size)
    attention = Attention(config, bias=True, window=window_of(config, layer))
    return Block(config.hidden_size, config.rms_norm_eps, attention, mlp)


FAMILY = Family(build_block)
