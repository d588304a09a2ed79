"""The token mixer of linear-attention layers: a gated delta rule between two projections."""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

from prime_hpc.models.recurrence import Recurrence


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, section 3.4): queries, keys and values pass a short
    convolution, and the output is normalised head by head and gated."""

    def __init__(
        self, hidden: int, *, key_heads: int, key_dim: int, heads: int, head_dim: int, taps: int, norm_eps: float
    ):
        super().__init__()
        self._sizes = [key_heads * key_dim, key_heads * key_dim, heads * head_dim]
        self._heads = [key_heads, key_heads, heads]
        channels = sum(self._sizes)
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, heads * head_dim, bias=False)
        self.in_proj_b, self.in_proj_a = (nn.Linear(hidden, heads, bias=False) for _ in range(2))
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False)
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        self.norm = nn.RMSNorm(head_dim, eps=norm_eps)
        self.out_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, recurrence: Recurrence) -> Tensor:
        """[n, hidden] to [n, hidden]. What decays and what gates is computed in float32."""
        mixed = recurrence.convolve(self.in_proj_qkv(x), self.conv1d.weight.squeeze(1)).split(self._sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part, heads in zip(mixed, self._heads, strict=True))
        log_decay = -self.A_log.float().exp() * softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        y = recurrence.delta_rule(q, k, v, log_decay, self.in_proj_b(x).sigmoid())
        return self.out_proj(self._gate(y, self.in_proj_z(x)).flatten(-2))

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        """norm(y) * silu(gate), [n, heads, d]."""
        normed = rms_norm(y.float(), self.norm.normalized_shape, self.norm.weight.float(), self.norm.eps)
        return (normed * silu(gate.float()).view_as(y)).to(y.dtype)
