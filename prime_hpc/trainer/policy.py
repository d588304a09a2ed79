"""The policy: a model whose forward ends in scores of tokens, whatever implements its decoder."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models.conversion import SAME, Conversion
from prime_hpc.models.lora import LoRA
from prime_hpc.trainer.head import rate_tokens, score_tokens, soften
from prime_hpc.trainer.optim import WHOLE
from prime_hpc.trainer.parallel.context import ContextParallel, Part
from prime_hpc.trainer.row import PackedRow


class PolicyModel(nn.Module):
    """Decoder and LM head as one module, so that the head's weight is whole when the forward scores tokens."""

    impl: str
    conversion: Conversion = SAME
    """From the names of parameters to those of the checkpoint."""
    lora: LoRA | None = None
    """The adapters that are trained in place of the parameters, if any."""
    sees = False
    """Whether it takes images."""
    forwards = ("next_logits", "rate")
    """Methods beside `forward` that compute with parameters."""
    logit_scale = 1.0
    """Logits are the product of the head times this,"""
    logit_cap: float | None = None
    """under this soft cap."""

    def __init__(self, decoder: nn.Module, head: nn.Linear | None, config: PreTrainedConfig, backend: str, chunk: int):
        super().__init__()
        self.config = config
        self.model = decoder
        self.lm_head = head
        self.backend = backend
        self.context = ContextParallel()
        self._chunk = chunk

    @property
    def kernels(self) -> str:
        """What mixes tokens, in words."""
        return self.backend

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def sharded_apart(self) -> nn.ModuleList:
        """The modules whose parameters are gathered only while they compute."""
        return self.blocks

    @property
    def head_weight(self) -> Tensor:
        """[V, h]; the embedding where the two are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability of every scored token given its document so far, and entropy of what it was drawn from.

        Returns:
            Two float32[n] in nats; log(1/V) and log(V), without gradient, where a token is not scored.

        Raises:
            ConfigurationError: the row has images, and the model does not see.
        """
        part, states = self._states(row)
        logprobs, entropy = score_tokens(states, self.head_weight, *self._targets(row, part), self._chunk,
                                         self._product_cap)  # fmt: skip
        uniform = torch.full_like(row.temperatures, float(self.head_weight.shape[0])).log()
        return self.context.unite(-uniform, row, part, logprobs), self.context.unite(uniform, row, part, entropy)

    @torch.no_grad()
    def rate(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability of every scored token, and 1 where no other is likelier; float32[n], 0 where not scored.

        Raises:
            ConfigurationError: the row has images, and the model does not see.
        """
        part, states = self._states(row)
        logprobs, hits = rate_tokens(states, self.head_weight, *self._targets(row, part), self._chunk,
                                     self._product_cap)  # fmt: skip
        nothing = torch.zeros_like(row.temperatures)
        return self.context.unite(nothing, row, part, logprobs), self.context.unite(nothing, row, part, hits)

    def _states(self, row: PackedRow) -> tuple[Part, Tensor]:
        """This rank's part of a row, and the states [m, h] that predict its scored tokens."""
        if row.images and not self.sees:
            problem = ConfigProblem(
                "model.path", self.config.model_type, "a model that sees: there are images to train"
            )
            raise ConfigurationError([problem])
        part = self.context.divide(row)
        if self.lora:
            self.lora.select(part.row.adapters)
        return part, self.hidden_states(part).index_select(0, part.before)

    def _targets(self, row: PackedRow, part: Part) -> tuple[Tensor, Tensor]:
        """Ids of the scored tokens, and the temperatures of the head's products."""
        return row.token_ids[part.scored], row.temperatures[part.scored] / self.logit_scale

    def next_logits(self, token_ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """One step of sampling.

        Args:
            token_ids: int64[b, t], the tokens that the cache does not hold yet.
            mask: int64[b, cached + t], 0 on padding (to the left).
            cache: what the step before returned, None at first.

        Returns:
            float32[b, V] logits of the next token, and the cache.
        """
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
        last, cache = self.extend(token_ids, positions, mask, cache)
        return self.logit_scale * soften((last @ self.head_weight.T).float(), self._product_cap), cache

    @property
    def _product_cap(self) -> float | None:
        """The cap of the head's product, before it is scaled."""
        return self.logit_cap and self.logit_cap / self.logit_scale

    def tenants(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The named parameters that are trained together: all of them (`WHOLE`), or those of each adapter."""
        if self.lora is None:
            return {WHOLE: list(self.named_parameters())}
        return {adapter: list(self.lora.parameters(adapter)) for adapter in self.lora.adapters}

    def tenant_of(self, adapter: str) -> str:
        """The tenant that trains on samples of `adapter`, which are the first's where they name none."""
        return WHOLE if self.lora is None else adapter or self.lora.adapters[0]

    def hidden_states(self, part: Part) -> Tensor:
        """[n, h] of the last layer, normed, of this rank's tokens."""
        raise NotImplementedError

    def extend(self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """The last hidden state [b, h] of each sequence after its new tokens, and the cache with them."""
        raise NotImplementedError

    def balance_experts(self, rate: float) -> dict[str, float]:
        """Settle the experts' load of a step: its metrics, after a move of the routers' biases by `rate`."""
        return {}

    def restore_buffers(self, modules: list[nn.Module]) -> None:
        """Compute the buffers of `modules` that no checkpoint holds."""
        raise NotImplementedError
