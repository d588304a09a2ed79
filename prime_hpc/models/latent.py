"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads come from one
small latent a token, beside one rotary key that the heads share."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from prime_hpc.models.attention import Attend
from prime_hpc.models.indexed import IndexedAttention
from prime_hpc.models.rotary import Rotation, latent_scale, rotate, rotate_pairs


class Indexer(nn.Module):
    """Which keys a query sees (DeepSeek-V3.2, arXiv 2512.02556, section 2.1). Frozen: no loss reaches a choice."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: Tensor, latent: Tensor, rotation: Rotation, attend: IndexedAttention) -> Tensor:
        """int32[n, top_k] of the states [n, hidden] and the queries' latent [n, q_rank]."""
        query = rotate_pairs(self.wq_b(latent).unflatten(-1, (self.heads, -1)), rotation)
        key = rotate_pairs(self.k_norm(self.wk(x))[:, None], rotation)[:, 0]
        weights = self.weights_proj(x).float() * (self.heads * self.head_dim) ** -0.5
        return attend.choose(query, key, weights)


class LatentAttention(nn.Module):
    """Latent attention over all earlier tokens of the document, or over those that an indexer chooses.

    Over all of them, keys and values are made of the latent for every head. Over chosen ones, the heads' matrices go to
    queries and outputs instead, so that all heads read the same keys, which are then the latent and the rotary key.

    Args:
        indexer: the layer whose indexer chooses; None for attention over all tokens. Its own in layer `layer`.
        shared: the next layer takes what this one's indexer chooses.
        pairs: neighbouring channels are turned together, rather than those of the two halves.
    """

    def __init__(self, config: PreTrainedConfig, layer: int, *, indexer: int | None = None, shared: bool = False,
                 pairs: bool = True):  # fmt: skip
        super().__init__()
        hidden, self.heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.sizes = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.rank, self.value_dim = rank, config.v_head_dim
        self.scale = latent_scale(config.rope_parameters) * sum(self.sizes) ** -0.5
        self._rotate = rotate_pairs if pairs else rotate
        query, eps, bias = self.heads * sum(self.sizes), config.rms_norm_eps, config.attention_bias
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, rank + self.sizes[1], bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(rank, eps=eps)
        self.kv_b_proj = nn.Linear(rank, self.heads * (self.sizes[0] + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value_dim, hidden, bias=bias)
        self._layer, self._source, self._shared = layer, indexer, shared
        self.indexer = Indexer(config) if indexer == layer else None

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[n, hidden] to [n, hidden]."""
        origin, query = self._queries(x)
        plain, turned = query.unflatten(-1, (self.heads, -1)).split(self.sizes, dim=-1)
        latent, key = self.kv_a_proj_with_mqa(x).split([self.rank, self.sizes[1]], dim=-1)
        latent, turned = self.kv_a_layernorm(latent), self._rotate(turned, rotation)
        key = self._rotate(key[:, None], rotation)
        if self._source is not None and isinstance(attend, IndexedAttention) and attend.sparse:
            chosen = self._choose(x, origin, rotation, attend)
            output = self._attend_to_chosen(plain, turned, latent, key, chosen, attend)
        else:
            output = self._attend_to_all(plain, turned, latent, key, attend)
        return self.o_proj(output.flatten(-2))

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What queries are made of, their latent where they have one, and the queries of all heads."""
        if not hasattr(self, "q_a_proj"):
            return x, self.q_proj(x)
        latent = self.q_a_layernorm(self.q_a_proj(x))
        return latent, self.q_b_proj(latent)

    def _choose(self, x: Tensor, origin: Tensor, rotation: Rotation, attend: IndexedAttention) -> Tensor:
        """A layer without an indexer takes what the one before it chose."""
        if self.indexer is None:
            return attend.kept(self._source)
        chosen = self.indexer(x, origin, rotation, attend)
        return attend.keep(self._layer, chosen) if self._shared else chosen

    def _attend_to_all(self, plain: Tensor, turned: Tensor, latent: Tensor, key: Tensor, attend: Attend) -> Tensor:
        """Values as long as keys, which not every kernel and no ring does without."""
        made, value = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split(
            [self.sizes[0], self.value_dim], dim=-1)  # fmt: skip
        keys = torch.cat([made, key.expand(-1, self.heads, -1)], dim=-1)
        value = pad(value, (0, sum(self.sizes) - self.value_dim))
        return attend(torch.cat([plain, turned], dim=-1), keys, value, self.scale)[..., : self.value_dim]

    def _attend_to_chosen(self, plain: Tensor, turned: Tensor, latent: Tensor, key: Tensor, chosen: Tensor,
                          attend: IndexedAttention) -> Tensor:  # fmt: skip
        to_key, to_value = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split(
            [self.sizes[0], self.value_dim], dim=1)  # fmt: skip
        query = torch.cat([torch.einsum("nhd,hdr->nhr", plain, to_key), turned], dim=-1)
        keys = torch.cat([latent, key[:, 0]], dim=-1)
        found = attend.over(query, keys, chosen, self.rank, self.scale)
        return torch.einsum("nhr,hdr->nhd", found, to_value)
