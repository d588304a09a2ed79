"""Attention over keys that were chosen for every query, in documents longer than the choice.

The two steps are operators of torch, so that whoever decides which activations are kept sees each as one.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prime_hpc.models import indexed_plain
from prime_hpc.models.attention import Attend
from prime_hpc.models.indexed_plain import slices

SCORES_BYTES = 2**28
"""About the memory of the scores that are there at a time."""


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
        return attend_to_chosen(query, self._gather(keys), chosen, value_dim, scale)[0]

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
    way, (begins, places), parts = _way(query, query.shape[-1]), visible.to(query.device), []
    for rows in slices(len(query), SCORES_BYTES // (4 * longest)):
        first, stop = int(visible[0, rows].min()), int(visible[1, rows].max()) + 1
        scores = way.score(query[rows], key[first:stop], weights[rows], begins[rows], places[rows], first)
        parts.append(_best(scores, first, top_k))
    return torch.cat(parts)


@torch.library.custom_op("prime_hpc::attend_to_chosen", mutates_args=())
def attend_to_chosen(
    query: Tensor, keys: Tensor, chosen: Tensor, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As `IndexedAttention.over`, of keys of the whole row; and the log-normalisers [m, heads]."""
    return _way(query, value_dim).attend(query, keys, chosen, value_dim, scale)


@torch.library.custom_op("prime_hpc::attend_to_chosen_backward", mutates_args=())
def attend_to_chosen_backward(
    grad: Tensor, query: Tensor, keys: Tensor, chosen: Tensor, output: Tensor, normaliser: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys. That of a key is summed in float32, on a GPU in no fixed order."""
    way = _way(query, output.shape[-1])
    by_query, by_keys = way.differentiate(grad, query, keys, chosen, output, normaliser, scale)
    return by_query, by_keys.to(keys.dtype)


def _way(query: Tensor, value_dim: int) -> Any:
    """The module that computes: kernels on a GPU, where they fit."""
    if query.is_cuda and importlib.util.find_spec("triton"):
        from prime_hpc.models import indexed_kernels

        if indexed_kernels.fit(query, value_dim):
            return indexed_kernels
    return indexed_plain


def _best(scores: Tensor, first: int, top_k: int) -> Tensor:
    """int32[m, top_k] of [m, n] scores; n may be fewer."""
    best = scores.topk(min(top_k, scores.shape[1]), sorted=False)
    chosen = torch.where(best.values > -torch.inf, best.indices + first, -1)
    return torch.cat([chosen, chosen.new_full((len(chosen), top_k - chosen.shape[1]), -1)], dim=1).int()


@choose_keys.register_fake
def _(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, longest: int, top_k: int) -> Tensor:
    return query.new_empty(len(query), top_k, dtype=torch.int32)


@attend_to_chosen.register_fake
def _(query: Tensor, keys: Tensor, chosen: Tensor, value_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    normaliser = query.new_empty(query.shape[:2], dtype=indexed_plain.sum_dtype(query))
    return query.new_empty(*query.shape[:2], value_dim), normaliser


@attend_to_chosen_backward.register_fake
def _(grad: Tensor, query: Tensor, keys: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(keys)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scale = inputs[4]


def _differentiate(ctx: Any, grad: Tensor, _normaliser_grad: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_to_chosen_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None


attend_to_chosen.register_autograd(_differentiate, setup_context=_keep)
