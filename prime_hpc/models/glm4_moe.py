"""GLM-4.5 (arXiv 2508.06471, section 2.1): sigmoid-routed experts with a score correction, beside a shared expert.

Heads are turned in part. The layers for multi-token prediction that checkpoints add at the end are left out.
"""

from typing import Any

from torch import nn
from transformers import Glm4MoeConfig

from prime_hpc.models.conversion import EXPERT_ROWS, Conversion
from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block, SwiGLU
from prime_hpc.models.moe import MixtureOfExperts, Routing


def build_block(config: Glm4MoeConfig, layer: int) -> Block:
    """The first `first_k_dense_replace` layers are dense."""
    head_norm_eps = config.rms_norm_eps if config.use_qk_norm else None
    attention = Attention(config, bias=config.attention_bias, head_norm_eps=head_norm_eps)
    return Block(config.hidden_size, config.rms_norm_eps, attention, build_mlp(config, layer))


def build_mlp(config: Any, layer: int) -> nn.Module:
    """A dense MLP in the first layers, then experts; also of the families that are built alike."""
    if layer < config.first_k_dense_replace:
        return SwiGLU(config.hidden_size, config.intermediate_size)
    return _build_experts(config)


def _build_experts(config: Any) -> nn.Module:
    routing = Routing(
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        correction=True,
        groups=config.n_group,
        top_groups=config.topk_group,
    )
    width = config.moe_intermediate_size
    shared = SwiGLU(config.hidden_size, width * config.n_shared_experts)
    return MixtureOfExperts(config.hidden_size, width, routing, shared)


CONVERSION = Conversion(
    {
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.score_correction": "mlp.gate.e_score_correction_bias",
        **EXPERT_ROWS,
    }
)

FAMILY = Family(build_block, CONVERSION)
