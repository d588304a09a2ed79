"""Context parallelism by exchange of heads (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509)."""

from math import gcd

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from prime_hpc.models.attention import Attend
from prime_hpc.trainer.parallel.collectives import all_to_all


class UlyssesAttention:
    """Before attention, a rank's tokens with all heads become all tokens of the row with some heads; after it, back.

    Key and value heads that are too few for the ranks are copied first. `whole` attends over the whole row.
    """

    def __init__(self, whole: Attend, group: ProcessGroup):
        self._whole, self._group, self._ranks = whole, group, group.size()

    @torch.compiler.disable
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """As `Attend`, for the n / ranks tokens of this rank."""
        copies = self._ranks // gcd(key.shape[1], self._ranks)
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        parts = [x.unflatten(1, (self._ranks, -1)) for x in (query, key, value)]
        heads = [part.shape[2] for part in parts]
        together = self._exchange(torch.cat(parts, dim=2).transpose(0, 1)).flatten(0, 1)
        output = self._whole(*together.split(heads, dim=1), scale, window)
        return self._exchange(output.unflatten(0, (self._ranks, -1))).transpose(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """[ranks, ...] by receiver to [ranks, ...] by sender."""
        ones = [1] * self._ranks
        return all_to_all(x, ones, ones, self._group)
