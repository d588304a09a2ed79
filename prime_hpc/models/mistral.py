"""Mistral (Jiang et al. 2023, arXiv 2310.06825) and Ministral: Llama with sliding windows, in all layers or in some."""

from transformers import MinistralConfig, MistralConfig

from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block, SwiGLU, window_of


def build_block(config: MistralConfig | MinistralConfig, layer: int) -> Block:
    """Layers differ in their windows, if any."""
    attention = Attention(config, window=window_of(config, layer))
    mlp = SwiGLU(config.hidden_size, config.intermediate_size)
    return Block(config.hidden_size, config.rms_norm_eps, attention, mlp)


FAMILY = Family(build_block)
