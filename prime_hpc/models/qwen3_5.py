"""Qwen3.5 (text): three layers of a gated delta rule to one of gated attention, whose heads are turned in part."""

from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen3_5TextConfig

from prime_hpc.models.attention import Attend
from prime_hpc.models.family import Family
from prime_hpc.models.gated_delta import GatedDeltaNet
from prime_hpc.models.layers import Attention, Block, SwiGLU, ZeroCentredNorm
from prime_hpc.models.rotary import Rotation, rotate


class GatedAttention(Attention):
    """Attention with normalised query and key heads whose output is gated channel by channel (Qiu et al. 2025, arXiv
    2505.06708); the gates of a head come from the same projection as its query, behind it."""

    def __init__(self, config: PreTrainedConfig, norm: type[nn.RMSNorm]):
        bias = config.attention_bias
        super().__init__(config, bias=bias, output_bias=bias)
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.o_proj.in_features, bias=bias)
        self.q_norm, self.k_norm = (norm(self.head_dim, eps=config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        return self.o_proj((attend(q, k, v, self.head_dim**-0.5) * gate.sigmoid()).flatten(-2))


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
