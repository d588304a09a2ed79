"""Qwen3.5 (text): three layers of a gated delta rule to one of gated attention, whose heads are turned in part."""

from torch import nn
from transformers import PreTrainedConfig, Qwen3_5TextConfig

from prime_hpc.models.family import Family
from prime_hpc.models.gated_delta import GatedDeltaNet
from prime_hpc.models.layers import Block, GatedAttention, SwiGLU, ZeroCentredNorm


def build_block(config: Qwen3_5TextConfig, layer: int) -> Block:
    """`layer_types` tells what mixes the tokens of a layer."""
    return assemble(config, layer, SwiGLU(config.hidden_size, config.intermediate_size))


def assemble(config: PreTrainedConfig, layer: int, mlp: nn.Module) -> Block:
    """A block of the dense or the sparse models around its MLP."""
    linear = config.layer_types[layer] == "linear_attention"
    mixer = _build_delta_net(config) if linear else GatedAttention(config, ZeroCentredNorm)
    return Block(config.hidden_size, config.rms_norm_eps, mixer, mlp, norm=ZeroCentredNorm)


def _build_delta_net(config: PreTrainedConfig) -> GatedDeltaNet:
    return GatedDeltaNet(
        config.hidden_size,
        key_heads=config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim,
        heads=config.linear_num_value_heads,
        head_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
        norm_eps=config.rms_norm_eps,
    )


FAMILY = Family(build_block, norm=ZeroCentredNorm)
