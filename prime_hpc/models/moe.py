"""Mixture of experts: a router that scores and chooses, experts as stacked matrices, shared experts beside them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from prime_hpc.models.grouped import Dispatch, grouped_matmul


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are scored and chosen."""

    experts: int
    top_k: int
    """Experts of a token."""
    score: Literal["softmax", "sigmoid"]
    """Of the router's logits: over all experts (Switch, arXiv 2101.03961), or each by itself (DeepSeek-V3)."""
    renormalise: bool
    """Weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    correction: bool = False
    """A bias is added to the scores where experts are chosen, but not where they are weighted."""
    groups: int = 1
    """Groups of neighbouring experts."""
    top_groups: int = 1
    """Groups of a token; its experts are chosen from these only."""


class Router(nn.Module):
    """Scores in float32 whatever the dtype of the states, since a rounded score can choose another expert."""

    score_correction: Tensor | None
    """float32[experts]; a buffer, as no gradient reaches it."""

    def __init__(self, hidden: int, routing: Routing):
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, hidden))
        correction = torch.zeros(routing.experts, dtype=torch.float32) if routing.correction else None
        self.register_buffer("score_correction", correction)

    def forward(self, x: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for the states [n, h].

        Args:
            replay: int64[n, k], experts to take instead of the chosen ones, for tokens where they are not negative.
                Only the choice is replayed: weights, and so gradients, are those of the present scores.

        Returns:
            float32[n, k] weights and int64[n, k] experts.
        """
        routing = self.routing
        logits = linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        if replay is not None:
            chosen = torch.where(replay < 0, chosen, replay)
        weights = scores.gather(-1, chosen)
        if routing.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(weights.dtype).tiny)
        return weights * routing.scale, chosen

    def _choose(self, scores: Tensor) -> Tensor:
        """int64[n, k], limited to the best groups; a group is as good as its two best experts together (DeepSeek-V3,
        arXiv 2412.19437, section 2.1.2)."""
        routing = self.routing
        if self.score_correction is not None:
            scores = scores + self.score_correction
        if routing.groups > 1:
            grouped = scores.unflatten(-1, (routing.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            scores = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
        return scores.topk(routing.top_k, dim=-1).indices


class Experts(nn.Module):
    """SwiGLU of every expert, as stacked matrices. Takes and gives rows sorted by expert, so that a wrapper may send
    them to other ranks and back."""

    multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(grouped_matmul)
    """Rows, stacked matrices and the rows' counts to the product."""
    update: Callable[[str, Tensor, Tensor], Tensor] | None = None
    """What adapters add to a product, from the name of its matrix, the rows and their counts."""

    def __init__(self, experts: int, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[m, hidden] to [m, hidden]; `counts` int64[experts] are the rows of each expert."""
        gate, up = (self._multiply(matrix, rows, counts) for matrix in ("gate_proj", "up_proj"))
        return self._multiply("down_proj", silu(gate) * up, counts)

    def _multiply(self, matrix: str, rows: Tensor, counts: Tensor) -> Tensor:
        product = self.multiply(rows, getattr(self, matrix), counts)
        return product if self.update is None else product + self.update(matrix, rows, counts)


class MixtureOfExperts(nn.Module):
    """Weighted sum of the chosen experts' outputs, plus what all tokens get from the shared experts."""

    def __init__(self, hidden: int, width: int, routing: Routing, shared_experts: nn.Module | None = None):
        super().__init__()
        self.router = Router(hidden, routing)
        self.experts = Experts(routing.experts, hidden, width)
        self.shared_experts = shared_experts

    def forward(self, x: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[n, hidden] to [n, hidden], and int64[n, k] of the experts that computed it; `replay` as in `Router`."""
        weights, chosen = self.router(x, replay)
        y = self.mix(x, weights, chosen)
        return (y if self.shared_experts is None else y + self.shared_experts(x)), chosen

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """What the chosen experts int64[n, k] make of [n, hidden], weighted by [n, k] and summed up."""
        dispatch = Dispatch.of(chosen, self.router.routing.experts)
        return dispatch.gather(self.experts(dispatch.scatter(x), dispatch.counts), weights)
