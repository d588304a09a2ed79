"""Qwen3 (arXiv 2505.09388, section 2): grouped-query attention with normalised query and key heads, SwiGLU."""

from transformers import Qwen3Config, Qwen3MoeConfig

from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block, SwiGLU, window_of


def build_attention(config: Qwen3Config | Qwen3MoeConfig, layer: int) -> Attention:
    """The attention of the dense and of the sparse models."""
    bias = config.attention_bias
    return Attention(config, bias=bias, output_bias=bias, head_norm_eps=config.rms_norm_eps,
                     window=window_of(config, layer))  # fmt: skip


def build_block(config: Qwen3Config, layer: int) -> Block:
    """Layers differ in their windows, if any."""
    mlp = SwiGLU(config.hidden_size, config.intermediate_size)
    return Block(config.hidden_size, config.rms_norm_eps, build_attention(config, layer), mlp)


FAMILY = Family(build_block)
