"""The decoder-only transformer around the blocks of a family."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from prime_hpc.models.attention import Attend
from prime_hpc.models.conversion import Conversion
from prime_hpc.models.layers import Block
from prime_hpc.models.recurrence import Recurrence
from prime_hpc.models.rotary import Rotary

BuildBlock = Callable[[Any, int], Block]
"""From a configuration and the index of a layer to its block."""


class Decoder(nn.Module):
    """Embedding, blocks and the last norm. Sharding, recomputation and compilation are applied from outside, to
    `layers`; a block neither knows which layer it is nor what documents there are."""

    def __init__(self, config: PreTrainedConfig, build_block: BuildBlock, norm: type[nn.RMSNorm] = nn.RMSNorm):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(build_block(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.recurs = not all(block.attends for block in self.layers)
        self.rotary = Rotary.of(config)

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
        rotation = self.rotary(position_ids, x.dtype)
        chosen = []
        for i, block in enumerate(self.layers):
            x, experts = block(x, rotation, attend, None if replay is None else replay[i], recurrence)
            if experts is not None:
                chosen.append(experts)
        return self.norm(x), chosen


class CausalLM(nn.Module):
    """Decoder and LM head, which is the embedding where the configuration ties the two."""

    def __init__(
        self,
        config: PreTrainedConfig,
        build_block: BuildBlock,
        conversion: Conversion,
        norm: type[nn.RMSNorm] = nn.RMSNorm,
    ):
        super().__init__()
        self.conversion = conversion
        self.model = Decoder(config, build_block, norm)
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
