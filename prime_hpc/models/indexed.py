"""Attention over keys that were chosen for every query, in documents longer than the choice.

The two steps are operators of torch, so that whoever decides which activations are kept sees each as one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from prime_hpc.models.attention import Attend

CHUNK_BYTES = 2**28
"""About the memory that a chunk of queries takes for what it reads or scores."""


class IndexedAttention:
    """`whole` for those who attend to everything, and a choice of `top_k` keys a query for those who choose.

    Args:
        seq_lens: documents of the whole row.
        places: int64[m], where the m tokens of this rank lie in it.
        gather: what makes [n, ...] of the whole row, with a gradient, of [m, ...] of this rank.
    """

    def __init__(self, whole: Attend, seq_lens: list[int], top_k: int, places: Tensor,
                 gather: Callable[[Tensor], Tensor] = lambda x: x):  # fmt: skip
        lengths = torch.tensor(seq_lens)
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        self.sparse = max(seq_lens) > top_k
        """Whether a choice leaves anything out."""
        self._whole, self._top_k, self._longest, self._gather = whole, top_k, max(seq_lens), gather
        self._visible = torch.stack([begins[places.cpu()], places.cpu()])
        self._kept: dict[int | None, Tensor] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return self._whole(query, key, value, scale)

    @torch.compiler.disable
    def choose(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        """The `top_k` earlier tokens of a token's document with the largest sum of weights * relu(query @ key).

        Args:
            query: [m, heads, d]; key: [m, d].
            weights: float32[m, heads].

        Returns:
            int32[m, top_k], places in the whole row in no order, -1 where there are not as many.
        """
        return choose_keys(query, self._gather(key), weights, self._visible, self._longest, self._top_k)

    @torch.compiler.disable
    def over(self, query: Tensor, keys: Tensor, chosen: Tensor, value_dim: int, scale: float) -> Tensor:
        """Attention over the chosen keys, which all heads share; their first `value_dim` channels are the values.

        Args:
            query: [m, heads, d]; keys: [m, d].
            chosen: int32[m, top_k], as `choose` returns them.

        Returns:
            [m, heads, value_dim].
        """
        return attend_to_chosen(query, self._gather(keys), chosen, value_dim, scale)

    @torch.compiler.disable
    def keep(self, layer: int, chosen: Tensor) -> Tensor:
        """Remember and return what the indexer of a layer chose."""
        self._kept[layer] = chosen
        return chosen

    @torch.compiler.disable
    def kept(self, layer: int | None) -> Tensor:
        """What it chose; still there when a later layer is computed anew for its gradient."""
        return self._kept[layer]


@torch.library.custom_op("prime_hpc::choose_keys", mutates_args=())
def choose_keys(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, longest: int, top_k: int) -> Tensor:
    """As `IndexedAttention.choose`, of keys of the whole row.

    Args:
        visible: int64[2, m] on the host, the first and the last key that a query may see.
        longest: how many these are at most.
    """
    (begins, places), parts = visible.to(query.device)[..., None], []
    step = max(1, CHUNK_BYTES // (4 * query.shape[1] * longest))
    for rows in _slices(len(query), step):
        first, stop = int(visible[0, rows].min()), int(visible[1, rows].max()) + 1
        scores = torch.einsum("mhd,nd->mhn", query[rows], key[first:stop]).relu().float()
        scores = torch.einsum("mhn,mh->mn", scores, weights[rows])
        there = torch.arange(first, stop, device=query.device)
        scores = scores.masked_fill((there > places[rows]) | (there < begins[rows]), -torch.inf)
        parts.append(_best(scores, first, top_k))
    return torch.cat(parts)


@choose_keys.register_fake
def _(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, longest: int, top_k: int) -> Tensor:
    return query.new_empty(len(query), top_k, dtype=torch.int32)


def _best(scores: Tensor, first: int, top_k: int) -> Tensor:
    """int32[m, top_k] of [m, n] scores; n may be fewer."""
    best = scores.topk(min(top_k, scores.shape[1]), sorted=False)
    chosen = torch.where(best.values > -torch.inf, best.indices + first, -1)
    return torch.cat([chosen, chosen.new_full((len(chosen), top_k - chosen.shape[1]), -1)], dim=1).int()


@torch.library.custom_op("prime_hpc::attend_to_chosen", mutates_args=())
def attend_to_chosen(query: Tensor, keys: Tensor, chosen: Tensor, value_dim: int, scale: float) -> Tensor:
    """As `IndexedAttention.over`, of keys of the whole row, by chunks of queries whose keys are copied together."""
    output = query.new_empty(*query.shape[:2], value_dim)
    for rows in _steps(chosen, keys):
        read, probs = _attend(query[rows], keys, chosen[rows], scale)
        torch.bmm(probs.to(read.dtype), read[..., :value_dim], out=output[rows])
    return output


@torch.library.custom_op("prime_hpc::attend_to_chosen_backward", mutates_args=())
def attend_to_chosen_backward(
    grad: Tensor, query: Tensor, keys: Tensor, chosen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys. Probabilities are computed anew; those of a key are summed in float32, on a GPU in
    no fixed order."""
    by_query, by_keys = torch.empty_like(query), keys.new_zeros(keys.shape, dtype=_sum_dtype(keys))
    values = slice(grad.shape[-1])
    for rows in _steps(chosen, keys):
        read, probs = _attend(query[rows], keys, chosen[rows], scale)
        by_probs = torch.bmm(grad[rows], read[..., values].mT).to(probs.dtype)
        by_score = (probs * (by_probs - (by_probs * probs).sum(-1, keepdim=True)) * scale).to(read.dtype)
        torch.bmm(by_score, read, out=by_query[rows])
        by_read = torch.bmm(by_score.mT, query[rows])
        by_read[..., values] += torch.bmm(probs.to(read.dtype).mT, grad[rows])
        by_keys.index_add_(0, chosen[rows].clamp(min=0).flatten(), by_read.flatten(0, 1).to(by_keys.dtype))
    return by_query, by_keys.to(keys.dtype)


@attend_to_chosen.register_fake
def _(query: Tensor, keys: Tensor, chosen: Tensor, value_dim: int, scale: float) -> Tensor:
    return query.new_empty(*query.shape[:2], value_dim)


@attend_to_chosen_backward.register_fake
def _(grad: Tensor, query: Tensor, keys: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(keys)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.scale = inputs[4]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_to_chosen_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None


attend_to_chosen.register_autograd(_differentiate, setup_context=_keep)


def _attend(query: Tensor, keys: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The keys [m, k, d] that are read, and probabilities [m, heads, k] in float32 or better."""
    read = keys.index_select(0, chosen.clamp(min=0).flatten()).unflatten(0, chosen.shape)
    scores = torch.bmm(query, read.mT).to(_sum_dtype(keys)) * scale
    return read, scores.masked_fill(chosen[:, None] < 0, -torch.inf).softmax(-1)


def _steps(chosen: Tensor, keys: Tensor) -> Iterator[slice]:
    return _slices(len(chosen), max(1, CHUNK_BYTES // (chosen.shape[1] * keys.shape[1] * keys.element_size())))


def _slices(n: int, step: int) -> Iterator[slice]:
    return (slice(first, first + step) for first in range(0, n, step))


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
