"""Expert parallelism by DeepEP (https://github.com/deepseek-ai/DeepEP): a token travels once to each rank that has some
of its experts, where `experts.py` sends a row for each of them, and what these give is summed up before it returns."""

import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models.grouped import count_tokens
from prime_hpc.models.moe import Experts, MixtureOfExperts

ELEMENT_BYTES = 2
"""DeepEP sends bfloat16."""


def dispatch_by_deepep(mixtures: list[MixtureOfExperts], group: ProcessGroup) -> None:
    """Send the tokens of `mixtures`, whose experts are divided among `group`, through one buffer.

    Raises:
        ConfigurationError: DeepEP is not installed.
    """
    buffer = open_buffer(group, mixtures[0].experts.gate_proj.shape[-1])
    for mixture in mixtures:
        experts, total = mixture.experts, mixture.router.routing.experts
        mixture.mix = torch.compiler.disable(partial(_mix, experts, buffer, total, total // group.size()))


def open_buffer(group: ProcessGroup, hidden: int) -> Any:
    """The `deep_ep.Buffer` of a group, by all of its ranks together: in memory that they reach over NVLink and, between
    nodes, over RDMA, as large as DeepEP's own settings for so many ranks want it."""
    if importlib.util.find_spec("deep_ep") is None:
        expected = "all_to_all, or DeepEP installed beside torch (from https://github.com/deepseek-ai/DeepEP)"
        raise ConfigurationError([ConfigProblem("trainer.parallel.ep_dispatch", "deepep", expected)])
    from deep_ep import Buffer

    ranks, width = group.size(), ELEMENT_BYTES * hidden
    settings = [Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)]
    nvlink = max(setting.get_nvl_buffer_size_hint(width, ranks) for setting in settings)
    rdma = max(setting.get_rdma_buffer_size_hint(width, ranks) for setting in settings)
    return Buffer(group, nvlink, rdma)


def _mix(experts: Experts, buffer: Any, total: int, here: int, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """`MixtureOfExperts.mix` where `here` of `total` experts are on this rank."""
    received, weights, chosen, rows, handle = _Dispatch.apply(x, weights, chosen, total, buffer)
    arrival = Arrival.of(chosen, here, rows)
    y = arrival.gather(experts(arrival.scatter(received), arrival.counts), weights)
    return _Combine.apply(y, handle, buffer)


class _Dispatch(torch.autograd.Function):
    """Its backward pass is DeepEP's combine: gradients of a token are summed over the ranks that had it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, total: int, buffer: Any) -> tuple[Any, ...]:
        """Tokens [r, h] with some expert on this rank, float32[r, k] weights and int64[r, k] of its experts, -1 for
        those of other ranks; how many pairs are left; and DeepEP's handle of the journey."""
        by_rank, by_node, by_expert, reaches, _ = buffer.get_dispatch_layout(chosen, total)
        received, chosen, weights, counts, ctx.handle, _ = buffer.dispatch(
            x, topk_idx=chosen, topk_weights=weights, num_tokens_per_rank=by_rank, num_tokens_per_rdma_rank=by_node,
            is_token_in_rank=reaches, num_tokens_per_expert=by_expert,
        )  # fmt: skip
        ctx.buffer = buffer
        ctx.mark_non_differentiable(chosen)
        return received, weights, chosen, sum(counts), ctx.handle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = ctx.buffer.combine(grad.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous())
        return grads[0], grads[1], None, None, None


class _Combine(torch.autograd.Function):
    """The sum over the ranks that had a token; its backward pass is DeepEP's dispatch."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: Any, buffer: Any) -> Tensor:
        ctx.handle, ctx.buffer = handle, buffer
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


@dataclass(frozen=True)
class Arrival:
    """The order that puts the m pairs of a received token and an expert of this rank together by expert."""

    pairs: Tensor
    """int64[m]: pair at each sorted place; pair p belongs to token p // k."""
    tokens: Tensor
    """int64[m]: the token of each."""
    by_token: Tensor
    """int64[m]: sorts the sorted places by token."""
    lengths: Tensor
    """int64[r]: pairs of each token."""
    counts: Tensor
    """int64[experts of this rank]: pairs of each."""

    @classmethod
    def of(cls, chosen: Tensor, experts: int, pairs: int) -> "Arrival":
        """From int64[r, k] of this rank's experts, of which `pairs` are not -1."""
        known = torch.where(chosen < 0, experts, chosen)
        order = known.flatten().argsort(stable=True)[:pairs]
        tokens = order // chosen.shape[1]
        return cls(order, tokens, tokens.argsort(stable=True), (chosen >= 0).sum(1),
                   count_tokens(known, experts + 1)[:-1])  # fmt: skip

    def scatter(self, x: Tensor) -> Tensor:
        """[r, h] to [m, h], sorted by expert."""
        return _Copy.apply(x, self.tokens, self.by_token, self.lengths)

    def gather(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[m, h] sorted by expert to [r, h]: the sum over a token's experts here, weighted by [r, k], in float32."""
        weighted = rows * weights.flatten().index_select(0, self.pairs)[:, None]
        return _Sum.apply(weighted, self.tokens, self.by_token, self.lengths).to(rows.dtype)


class _Copy(torch.autograd.Function):
    """Its backward pass sums in a fixed order, where that of an index would add by atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, by_token: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(by_token, lengths)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return _sum(wide, *ctx.saved_tensors).to(grad.dtype), None, None, None


class _Sum(torch.autograd.Function):
    """The way back of `_Copy`, and the same the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, by_token: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sum(rows, by_token, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return grad.index_select(0, tokens), None, None, None


def _sum(rows: Tensor, by_token: Tensor, lengths: Tensor) -> Tensor:
    """[m, h] sorted by expert to [r, h]. What it checks, and would wait for the device for, is so by construction."""
    return torch.segment_reduce(rows.index_select(0, by_token), "sum", lengths=lengths, initial=0, unsafe=True)
