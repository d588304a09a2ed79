"""Qwen2 and Qwen2.5 (arXiv 2407.10671, section 2.2): grouped-query attention, biases on queries, keys and values."""

from transformers import Qwen2Config

from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block, SwiGLU


def build_block(config: Qwen2Config, layer: int) -> Block:
    """All layers are alike."""
    mlp = SwiGLU(config.hidden_size, config.intermediate_size)
    return Block(config.hidden_size, config.rms_norm_eps, Attention(config, bias=True), mlp)


FAMILY = Family(build_block)
