"""Policies whose decoder is one of `prime_hpc.models`."""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from prime_hpc.models.attention import CachedAttention
from prime_hpc.models.balance import ExpertLoad, even_out, max_violation
from prime_hpc.models.family import Family
from prime_hpc.models.recurrence import INSTALL, TORCH, CachedRecurrence, open_recurrence
from prime_hpc.trainer.parallel.context import Part
from prime_hpc.trainer.policy import PolicyModel

SLOW = f" (slow for linear attention in half precision: {INSTALL})"


class NativePolicy(PolicyModel):
    """A model of `prime_hpc.models`, whose linear attention, if it has any, runs on the kernels `linear`."""

    impl = "native"

    def __init__(self, family: Family, config: PreTrainedConfig, backend: str, linear: str, chunk: int):
        lm = family.build(config)
        super().__init__(lm.model, lm.lm_head, config, backend, chunk)
        self.conversion = lm.conversion
        self._linear = linear
        self._load = ExpertLoad(lm)
        self._top_k: int | None = getattr(config, "index_topk", None)

    @property
    def kernels(self) -> str:
        if not self.model.recurs:
            return self.backend
        slow = self._linear == TORCH and self.head_weight.is_cuda
        return f"{self.backend} and {self._linear}{SLOW * slow}"

    def hidden_states(self, part: Part) -> Tensor:
        """Neither padding, nor rows that train nothing, nor passes without a gradient count as load of the experts."""
        row = part.row
        attend = self.context.open_attention(self.backend, row.seq_lens, row.token_ids.device, self._top_k)
        recurrence = open_recurrence(self._linear, row.seq_lens, row.token_ids.device) if self.model.recurs else None
        hidden, chosen = self.model(row.token_ids, row.position_ids, attend, row.replay, recurrence)
        counted = part.real if len(row.scored) and torch.is_grad_enabled() else 0
        self._load.add([layer[:counted] for layer in chosen])
        return hidden

    def extend(
        self,
        token_ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: tuple[CachedAttention, CachedRecurrence] | None,
    ) -> tuple[Tensor, tuple[CachedAttention, CachedRecurrence]]:
        if self._top_k and mask.shape[1] > self._top_k:
            raise NotImplementedError(f"sampling by the trainer beyond {self._top_k} tokens, where an indexer chooses")
        attend, recurrence = cache = cache or (CachedAttention(), CachedRecurrence())
        attend.begin(mask)
        recurrence.begin(mask)
        hidden, _ = self.model(token_ids.flatten(), positions.flatten(), attend, recurrence=recurrence)
        return hidden.unflatten(0, token_ids.shape)[:, -1], cache

    def balance_experts(self, rate: float) -> dict[str, float]:
        """Sums the load over all ranks, so that the biases stay alike on them. That ranks which see the same tokens all
        count them changes neither a comparison with the mean nor a ratio to it."""
        load = self._load.take()
        if load is None:
            return {}
        dist.all_reduce(load)
        for router, layer in zip(self._load.routers, load, strict=True):
            if router.score_correction is not None and rate:
                even_out(router.score_correction, layer, rate)
        violation = max_violation(load)
        return {"moe/max_vio": violation.mean().item(), "moe/max_vio_worst": violation.max().item()}
