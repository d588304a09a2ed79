"""Layers that the model families share. All tokens of a packed row are one dimension, n."""

from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedConfig

from prime_hpc.models.attention import Attend
from prime_hpc.models.gated_delta import GatedDeltaNet
from prime_hpc.models.moe import MixtureOfExperts
from prime_hpc.models.recurrence import Recurrence
from prime_hpc.models.rotary import Rotation, head_dim_of, rotate


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    With `head_norm_eps` every query and key head is normalised before it is turned.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        bias: bool = False,
        output_bias: bool = False,
        head_norm_eps: float | None = None,
    ):
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim = head_dim_of(config)
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=output_bias)
        self.q_norm, self.k_norm = (
            nn.Identity() if head_norm_eps is None else nn.RMSNorm(head_dim, eps=head_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[n, hidden] to [n, hidden]."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        return self.o_proj(attend(q, k, v, self.head_dim**-0.5).flatten(-2))


class ZeroCentredRMSNorm(nn.RMSNorm):
    """Scales by 1 + weight, in float32 throughout, as engines do: half precision would round the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


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


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, hidden: int, width: int, *, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + mlp(norm(x)). What mixes tokens, attention or a gated delta
    rule, has its name in checkpoints."""

    self_attn: Attention
    linear_attn: GatedDeltaNet

    def __init__(
        self,
        hidden: int,
        norm_eps: float,
        mixer: Attention | GatedDeltaNet,
        mlp: nn.Module,
        norm: type[nn.RMSNorm] = nn.RMSNorm,
    ):
        super().__init__()
        self.attends = isinstance(mixer, Attention)
        self.add_module("self_attn" if self.attends else "linear_attn", mixer)
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = (norm(hidden, eps=norm_eps) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attend: Attend,
        replay: Tensor | None = None,
        recurrence: Recurrence | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[n, hidden] to [n, hidden].

        Args:
            replay: int64[n, k], experts recorded when the tokens were sampled; only a mixture of experts heeds it.
            recurrence: what a gated delta rule is computed by; attention does without.

        Returns:
            The new states, and int64[n, k] of the experts that computed them if there are experts.
        """
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, rotation, attend) if self.attends else self.linear_attn(y, recurrence))
        y = self.post_attention_layernorm(x)
        update, chosen = self.mlp(y, replay) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(y), None)
        return x + update, chosen
