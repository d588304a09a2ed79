"""Layers that the model families share. All tokens of a packed row are one dimension, n."""

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from prime_hpc.models.attention import Attend
from prime_hpc.models.moe import MixtureOfExperts
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
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, norm_eps: float, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(hidden, eps=norm_eps) for _ in range(2))

    def forward(
        self, x: Tensor, rotation: Rotation, attend: Attend, replay: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[n, hidden] to [n, hidden].

        Args:
            replay: int64[n, k], experts recorded when the tokens were sampled; only a mixture of experts heeds it.

        Returns:
            The new states, and int64[n, k] of the experts that computed them if there are experts.
        """
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        y = self.post_attention_layernorm(x)
        update, chosen = self.mlp(y, replay) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(y), None)
        return x + update, chosen
