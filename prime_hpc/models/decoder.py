"""The decoder-only transformer around the blocks of a family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import PreTrainedConfig

from prime_hpc.models.attention import Attend
from prime_hpc.models.recurrence import Recurrence
from prime_hpc.models.rotary import Rotary, layer_kinds

if TYPE_CHECKING:
    from prime_hpc.models.family import Family


class Decoder(nn.Module):
    """Embedding, blocks and the last norm. Sharding, recomputation and compilation are applied from outside, to
    `layers`; a block neither knows which layer it is nor what documents there are."""

    def __init__(self, config: PreTrainedConfig, family: Family):
        super().__init__()
        self.embed_tokens = family.build_embedding(config)
        self.layers = nn.ModuleList(family.build_block(config, i) for i in range(config.num_hidden_layers))
        self.norm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.recurs = not all(block.attends for block in self.layers)
        self.kinds = layer_kinds(config)
        self.rotaries = {kind: Rotary.of(config, kind) for kind in dict.fromkeys(self.kinds)}

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attend: Attend,
        replay: Tensor | None = None,
        recurrence: Recurrence | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of the packed tokens int64[n].

        Args:
            position_ids: int64[n], each token's place in its document.
            attend: attention within the documents of the row.
            replay: int64[layers, n, k], experts recorded at sampling; negative where there is no record, and without
                meaning for dense layers.
            recurrence: gated delta rule within the documents of the row; only a model that `recurs` needs it.

        Returns:
            [n, hidden], ready for the LM head, and int64[n, k] of chosen experts for each sparse layer.
        """
        x = self.embed_tokens(token_ids)
        rotations = {kind: rotary(position_ids, x.dtype) for kind, rotary in self.rotaries.items()}
        chosen = []
        for i, block in enumerate(self.layers):
            experts_of = None if replay is None else replay[i]
            x, experts = block(x, rotations[self.kinds[i]], attend, experts_of, recurrence)
            if experts is not None:
                chosen.append(experts)
        return self.norm(x), chosen


class CausalLM(nn.Module):
    """Decoder and LM head, which is the embedding where the configuration ties the two."""

    def __init__(self, config: PreTrainedConfig, family: Family):
        super().__init__()
        self.conversion = family.conversion
        self.model = Decoder(config, family)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """[V, hidden]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attend: Attend,
        replay: Tensor | None = None,
        recurrence: Recurrence | None = None,
    ) -> Tensor:
        """Logits [n, V]; arguments as of `Decoder`."""
        hidden, _ = self.model(token_ids, position_ids, attend, replay, recurrence)
        return nn.functional.linear(hidden, self.head_weight)
