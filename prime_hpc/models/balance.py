"""How evenly tokens fall on experts, and the bias that evens them out without a loss term."""

import torch
from torch import Tensor, nn

from prime_hpc.models.grouped import count_tokens
from prime_hpc.models.moe import Router


class ExpertLoad:
    """Tokens that each expert of each layer got since the last `take`. `routers` are those of a model, in order."""

    def __init__(self, model: nn.Module):
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self._load: Tensor | None = None

    def add(self, chosen: list[Tensor]) -> None:
        """Count the experts int64[n, k] that each router chose in one forward pass."""
        if self.routers:
            experts = self.routers[0].routing.experts
            layers = torch.stack(chosen)
            first = experts * torch.arange(len(self.routers), device=layers.device)
            counts = count_tokens(layers + first[:, None, None], experts * len(first)).unflatten(0, (-1, experts))
            self._load = counts if self._load is None else self._load + counts

    def take(self) -> Tensor | None:
        """int64[sparse layers, experts], or None where nothing was counted; starts again from nothing."""
        load, self._load = self._load, None
        return load


def max_violation(load: Tensor) -> Tensor:
    """MaxVio of each layer: by what share the busiest expert's load passes the mean (Wang et al. 2024, arXiv
    2408.15664, section 4.1). 0 is even, experts / top_k - 1 the worst.

    Args:
        load: [layers, experts], tokens.

    Returns:
        float32[layers].
    """
    mean = load.float().mean(-1)
    return (load.amax(-1) - mean) / mean


def even_out(correction: Tensor, load: Tensor, rate: float) -> None:
    """Move a score-correction bias float32[experts] by `rate`, up for experts below the mean load int64[experts] and
    down for those above (ibid., algorithm 1)."""
    load = load.float()
    correction += rate * (load.mean() - load).sign()
