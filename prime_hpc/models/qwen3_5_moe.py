"""Qwen3.5-MoE (text): Qwen3.5 with softmax-routed experts in every layer, beside a shared expert that has a gate."""

from torch import Tensor, nn
from transformers import Qwen3_5MoeTextConfig

from prime_hpc.models.conversion import EXPERT_ROWS, Conversion
from prime_hpc.models.family import Family
from prime_hpc.models.layers import Block, SwiGLU, ZeroCentredNorm
from prime_hpc.models.moe import MixtureOfExperts, Routing
from prime_hpc.models.qwen3_5 import assemble


class GatedExpert(SwiGLU):
    """What an expert makes of a token, times one gate."""

    def __init__(self, hidden: int, width: int):
        super().__init__(hidden, width)
        self.gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * super().forward(x)


def build_block(config: Qwen3_5MoeTextConfig, layer: int) -> Block:
    """Experts in all layers."""
    routing = Routing(
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        score="softmax",
        renormalise=True,
    )
    shared = GatedExpert(config.hidden_size, config.shared_expert_intermediate_size)
    mixture = MixtureOfExperts(config.hidden_size, config.moe_intermediate_size, routing, shared)
    return assemble(config, layer, mixture)


FAMILY = Family(
    build_block,
    Conversion(
        {
            "mlp.router.weight": "mlp.gate.weight",
            **EXPERT_ROWS,
            "mlp.shared_experts.gate_proj.weight": "mlp.shared_expert.gate_proj.weight",
            "mlp.shared_experts.up_proj.weight": "mlp.shared_expert.up_proj.weight",
            "mlp.shared_experts.down_proj.weight": "mlp.shared_expert.down_proj.weight",
            "mlp.shared_experts.gate.weight": "mlp.shared_expert_gate.weight",
        }
    ),
    ZeroCentredNorm,
)
