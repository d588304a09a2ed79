"""AFMoE (Arcee's Trinity): sigmoid-routed experts with a score correction beside shared ones, and attention with a gate
on its output. Layers with sliding windows have rotary positions, the others none. Norms are on both sides of attention
and MLP; query and key heads are normalised."""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from prime_hpc.models.attention import Attend
from prime_hpc.models.conversion import EXPERT_ROWS, Conversion
from prime_hpc.models.family import Family
from prime_hpc.models.layers import Attention, Block, Embedding, SandwichBlock, SwiGLU, window_of
from prime_hpc.models.moe import MixtureOfExperts, Routing
from prime_hpc.models.rotary import Rotation, head_dim_of, rotate


class OutputGatedAttention(Attention):
    """Attention whose output is multiplied by a sigmoid gate, channel by channel. Only in layers with a window are
    heads turned."""

    def __init__(self, config: PreTrainedConfig, window: int | None):
        bias, eps = config.attention_bias, config.rms_norm_eps
        super().__init__(config, bias=bias, output_bias=bias, head_norm_eps=eps, window=window)
        width = config.num_attention_heads * head_dim_of(config)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[n, hidden] to [n, hidden]."""
        q, k, v = self._heads(x)
        if self.window is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        output = attend(q, k, v, self.scale, self.window).flatten(-2)
        return self.o_proj(output * self.gate_proj(x).sigmoid())


def build_block(config: PreTrainedConfig, layer: int) -> Block:
    """The first `num_dense_layers` layers are dense."""
    dense = layer < config.num_dense_layers
    mlp = SwiGLU(config.hidden_size, config.intermediate_size) if dense else _build_experts(config)
    attention = OutputGatedAttention(config, window_of(config, layer))
    return SandwichBlock(config.hidden_size, config.rms_norm_eps, attention, mlp)


def _build_experts(config: PreTrainedConfig) -> nn.Module:
    routing = Routing(
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        renormalise=True,
        scale=config.route_scale,
        correction=True,
    )
    width = config.moe_intermediate_size
    shared = SwiGLU(config.hidden_size, width * config.num_shared_experts)
    return MixtureOfExperts(config.hidden_size, width, routing, shared)


def build_embedding(config: PreTrainedConfig) -> nn.Embedding:
    """With muP, embeddings are scaled up to the residual stream."""
    return Embedding(config, config.hidden_size**0.5 if config.mup_enabled else 1.0)


FAMILY = Family(
    build_block,
    Conversion(
        {
            "mlp.router.weight": "mlp.router.gate.weight",
            "mlp.router.score_correction": "mlp.expert_bias",
            **EXPERT_ROWS,
        }
    ),
    build_embedding=build_embedding,
)
