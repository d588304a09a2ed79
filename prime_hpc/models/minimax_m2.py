"""MiniMax-M2: sigmoid-routed experts with a score correction in every layer, none of them shared; queries and keys are
normalised over all heads together, and heads turned in part."""

from transformers import MiniMaxM2Config

from prime_hpc.models.conversion import Conversion
from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block
from prime_hpc.models.moe import MixtureOfExperts, Routing


def build_block(config: MiniMaxM2Config, layer: int) -> Block:
    """All layers are alike."""
    routing = Routing(
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        renormalise=True,
        correction=True,
    )
    attention = Attention(config, vector_norm_eps=config.rms_norm_eps)
    experts = MixtureOfExperts(config.hidden_size, config.intermediate_size, routing)
    return Block(config.hidden_size, config.rms_norm_eps, attention, experts)


FAMILY = Family(
    build_block,
    Conversion(
        {
            "mlp.router.weight": "block_sparse_moe.gate.weight",
            "mlp.router.score_correction": "block_sparse_moe.e_score_correction_bias",
            "mlp.experts.gate_proj": "block_sparse_moe.experts.{expert}.w1.weight",
            "mlp.experts.up_proj": "block_sparse_moe.experts.{expert}.w3.weight",
            "mlp.experts.down_proj": "block_sparse_moe.experts.{expert}.w2.weight",
        }
    ),
)
