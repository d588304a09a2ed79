"""Qwen3-MoE (arXiv 2505.09388, section 2): Qwen3 with softmax-routed experts, none of them shared."""

from torch import nn
from transformers import Qwen3MoeConfig

from prime_hpc.models.conversion import EXPERT_ROWS, Conversion
from prime_hpc.models.family import Family
from prime_hpc.models.layers import Block, SwiGLU
from prime_hpc.models.moe import MixtureOfExperts, Routing
from prime_hpc.models.qwen3 import build_attention


def build_block(config: Qwen3MoeConfig, layer: int) -> Block:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    dense = layer in (config.mlp_only_layers or ()) or (layer + 1) % config.decoder_sparse_step
    mlp = SwiGLU(config.hidden_size, config.intermediate_size) if dense else _build_experts(config)
    return Block(config.hidden_size, config.rms_norm_eps, build_attention(config, layer), mlp)


def _build_experts(config: Qwen3MoeConfig) -> nn.Module:
    routing = Routing(
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        score="softmax",
        renormalise=config.norm_topk_prob,
    )
    return MixtureOfExperts(config.hidden_size, config.moe_intermediate_size, routing)


FAMILY = Family(
    build_block,
    Conversion(
        {
            "mlp.router.weight": "mlp.gate.weight",
            **EXPERT_ROWS,
        }
    ),
)
