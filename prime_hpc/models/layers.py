"""Layers that the model families share. All tokens of a packed row are one dimension, n."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm, silu
from transformers import PreTrainedConfig

from prime_hpc.models.attention import Attend
from prime_hpc.models.gated_delta import GatedDeltaNet
from prime_hpc.models.moe import MixtureOfExperts
from prime_hpc.models.recurrence import Recurrence
from prime_hpc.models.rotary import Rotation, head_dim_of, rotate


def window_of(config: PreTrainedConfig, layer: int) -> int | None:
    """The window of a layer, from a configuration whose layers may slide."""
    types = getattr(config, "layer_types", None)
    return config.sliding_window if types is None or types[layer] == "sliding_attention" else None


class Embedding(nn.Embedding):
    """Embedding of tokens, times `scale`; rounded first to the dtype of the embedding, if `rounded`."""

    def __init__(self, config: PreTrainedConfig, scale: float = 1.0, *, rounded: bool = False):
        super().__init__(config.vocab_size, config.hidden_size)
        self.scale, self.rounded = scale, rounded

    def forward(self, token_ids: Tensor) -> Tensor:
        x = super().forward(token_ids)
        if self.scale == 1.0:
            return x
        return x * (torch.tensor(self.scale, dtype=x.dtype, device="cpu").item() if self.rounded else self.scale)


class ZeroCentredNorm(nn.RMSNorm):
    """RMS norm whose factors are 1 + weight, in float32 as engines have it: half precision would round the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class VectorNorm(nn.RMSNorm):
    """RMS norm over the channels of all heads together."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, heads, d] to the same."""
        return super().forward(x.flatten(-2)).view_as(x)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    Before they are turned, every query and key head is normalised with `head_norm_eps`, all of them together with
    `vector_norm_eps`. With a `window`, a token sees so many, itself the last. Without a `scale` it is 1 / sqrt(d).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        bias: bool = False,
        output_bias: bool = False,
        head_norm_eps: float | None = None,
        vector_norm_eps: float | None = None,
        norm: type[nn.RMSNorm] = nn.RMSNorm,
        window: int | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim = head_dim_of(config)
        self.window = window
        self.scale = head_dim**-0.5 if scale is None else scale
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=output_bias)
        self.q_norm, self.k_norm = (
            _build_norm(norm, head_dim, count, head_norm_eps, vector_norm_eps) for count in (heads, kv_heads)
        )

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[n, hidden] to [n, hidden]."""
        q, k, v = self._heads(x)
        q, k = rotate(q, rotation), rotate(k, rotation)
        return self.o_proj(attend(q, k, v, self.scale, self.window).flatten(-2))

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [n, heads, d], normalised."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.q_norm(q), self.k_norm(k), v


def _build_norm(
    norm: type[nn.RMSNorm], head_dim: int, heads: int, head_eps: float | None, vector_eps: float | None
) -> nn.Module:
    if vector_eps is not None:
        return VectorNorm(heads * head_dim, eps=vector_eps)
    return nn.Identity() if head_eps is None else norm(head_dim, eps=head_eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    activate: Callable[[Tensor], Tensor] = staticmethod(silu)

    def __init__(self, hidden: int, width: int, *, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)) (ibid.), with gelu by its tanh approximation."""

    activate = staticmethod(partial(gelu, approximate="tanh"))


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + mlp(norm(x)). What mixes tokens, attention or a gated delta
    rule, has its name in checkpoints."""

    self_attn: Attention
    linear_attn: GatedDeltaNet

    def __init__(
        self,
        hidden: int,
        norm_eps: float,
        mixer: nn.Module,
        mlp: nn.Module,
        *,
        norm: type[nn.RMSNorm] = nn.RMSNorm,
    ):
        super().__init__()
        self.attends = not isinstance(mixer, GatedDeltaNet)
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


class SandwichBlock(Block):
    """Residual block with norms on both sides: x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self,
        hidden: int,
        norm_eps: float,
        attention: Attention,
        mlp: nn.Module,
        *,
        norm: type[nn.RMSNorm] = nn.RMSNorm,
    ):
        super().__init__(hidden, norm_eps, attention, mlp, norm=norm)
        self.pre_mlp_layernorm, self.post_mlp_layernorm = (norm(hidden, eps=norm_eps) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attend: Attend,
        replay: Tensor | None = None,
        recurrence: Recurrence | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `Block.forward`."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotation, attend))
        y = self.pre_mlp_layernorm(x)
        update, chosen = self.mlp(y, replay) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(y), None)
        return x + self.post_mlp_layernorm(update), chosen
