"""Attention over chosen keys for any device and dtype: for some queries at a time, their keys are copied together."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 2**28
"""About the memory of the keys that are copied, or of the heads' scores, at a time."""


def score(query: Tensor, key: Tensor, weights: Tensor, begins: Tensor, places: Tensor, first: int) -> Tensor:
    """float32[m, n]: the sum over heads of weights * relu(query @ key), -inf for keys that a query may not see.

    Args:
        query: [m, heads, d]; key: [n, d], of the tokens from `first` on.
        weights: float32[m, heads].
        begins: int64[m], places: int64[m], first and last token that a query sees.
    """
    there, parts = torch.arange(first, first + len(key), device=query.device), []
    for rows in slices(len(query), CHUNK_BYTES // (4 * query.shape[1] * len(key))):
        scores = torch.einsum("mhd,nd->mhn", query[rows], key).relu().float()
        scores = torch.einsum("mhn,mh->mn", scores, weights[rows])
        unseen = (there > places[rows, None]) | (there < begins[rows, None])
        parts.append(scores.masked_fill(unseen, -torch.inf))
    return torch.cat(parts)


def attend(query: Tensor, keys: Tensor, chosen: Tensor, value_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and log-normalisers in float32 or better; arguments as of `indexed.attend_to_chosen`."""
    output = query.new_empty(*query.shape[:2], value_dim)
    normaliser = query.new_empty(query.shape[:2], dtype=sum_dtype(query))
    for rows in _steps(chosen, keys):
        read, scores = _read(query[rows], keys, chosen[rows], scale)
        normaliser[rows] = scores.logsumexp(-1)
        torch.bmm(scores.softmax(-1).to(read.dtype), read[..., :value_dim], out=output[rows])
    return output, normaliser


def differentiate(grad: Tensor, query: Tensor, keys: Tensor, chosen: Tensor, output: Tensor, normaliser: Tensor,
                  scale: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of query and, in float32 or better, of keys. Probabilities are computed anew."""
    by_query, by_keys = torch.empty_like(query), keys.new_zeros(keys.shape, dtype=sum_dtype(keys))
    values, inner = slice(grad.shape[-1]), (grad.to(normaliser.dtype) * output).sum(-1)
    for rows in _steps(chosen, keys):
        read, scores = _read(query[rows], keys, chosen[rows], scale)
        probs = (scores - normaliser[rows, :, None]).exp()
        by_probs = torch.bmm(grad[rows], read[..., values].mT).to(probs.dtype)
        by_score = (probs * (by_probs - inner[rows, :, None]) * scale).to(read.dtype)
        torch.bmm(by_score, read, out=by_query[rows])
        by_read = torch.bmm(by_score.mT, query[rows])
        by_read[..., values] += torch.bmm(probs.to(read.dtype).mT, grad[rows])
        by_keys.index_add_(0, chosen[rows].clamp(min=0).flatten(), by_read.flatten(0, 1).to(by_keys.dtype))
    return by_query, by_keys


def slices(n: int, step: int) -> Iterator[slice]:
    """`n` cut into pieces of `step`, or of one where that is less."""
    step = max(1, step)
    return (slice(first, first + step) for first in range(0, n, step))


def sum_dtype(x: Tensor) -> torch.dtype:
    """In which many of `x` are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _read(query: Tensor, keys: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The chosen keys [m, k, d], and scores [m, heads, k], -inf where none was chosen."""
    read = keys.index_select(0, chosen.clamp(min=0).flatten()).unflatten(0, chosen.shape)
    scores = torch.bmm(query, read.mT).to(sum_dtype(keys)) * scale
    return read, scores.masked_fill(chosen[:, None] < 0, -torch.inf)


def _steps(chosen: Tensor, keys: Tensor) -> Iterator[slice]:
    return slices(len(chosen), CHUNK_BYTES // (chosen.shape[1] * keys.shape[1] * keys.element_size()))
