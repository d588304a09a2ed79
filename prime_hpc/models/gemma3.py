"""Gemma 3 (arXiv 2503.19786, section 2), text alone: five layers with sliding windows to one without, each kind with a
rotary embedding of its own; norms on both sides of attention and MLP; query and key heads normalised."""

from torch import nn
from transformers import Gemma3TextConfig

from prime_hpc.models.conversion import Conversion
from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block, Embedding, GeGLU, SandwichBlock, ZeroCentredNorm, window_of


def build_block(config: Gemma3TextConfig, layer: int) -> Block:
    """Layers differ in their windows."""
    attention = Attention(
        config,
        bias=config.attention_bias,
        output_bias=config.attention_bias,
        head_norm_eps=config.rms_norm_eps,
        norm=ZeroCentredNorm,
        window=window_of(config, layer),
        scale=config.query_pre_attn_scalar**-0.5,
    )
    mlp = GeGLU(config.hidden_size, config.intermediate_size)
    return SandwichBlock(config.hidden_size, config.rms_norm_eps, attention, mlp, norm=ZeroCentredNorm)


def build_embedding(config: Gemma3TextConfig) -> nn.Embedding:
    """Embeddings are scaled up to the residual stream."""
    return Embedding(config, config.hidden_size**0.5, rounded=True)


FAMILY = Family(
    build_block,
    Conversion(
        {
            "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
            "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
        }
    ),
    norm=ZeroCentredNorm,
    build_embedding=build_embedding,
)
