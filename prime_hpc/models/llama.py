"""Llama (Touvron et al. 2023, arXiv 2302.13971; Llama 3, arXiv 2407.21783): grouped-query attention and SwiGLU."""

from transformers import LlamaConfig

from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block, SwiGLU


def build_block(config: LlamaConfig, layer: int) -> Block:
    """All layers are alike."""
    attention = Attention(config, bias=config.attention_bias, output_bias=config.attention_bias)
    mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return Block(config.hidden_size, config.rms_norm_eps, attention, mlp)


FAMILY = Family(build_block)
