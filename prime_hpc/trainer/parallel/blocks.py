"""Attention of some queries over some keys that also gives its log-normaliser, and its backward pass under the
normaliser of all keys: what a ring needs and no public interface of torch has."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Block:
    """Queries and keys among the tokens of two ranks. With `lengths` both are the same, documents of these lengths
    that do not see each other; without, they are of one document, and the keys all before the queries."""

    queries: slice
    keys: slice
    lengths: list[int] | None
    causal: bool
    reach: int | None = None
    """Keys before its own that a query sees, if the last query's own is the last key; all where there is none."""
    bounds: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """int32 begins of the documents of queries and keys and the end of the last, on the device."""

    def query_lengths(self) -> list[int]:
        return self.lengths or [self.queries.stop - self.queries.start]

    def key_lengths(self) -> list[int]:
        return self.lengths or [self.keys.stop - self.keys.start]

    def sides(self) -> dict[str, int]:
        """What a kernel is told of the reach."""
        if self.reach is None:
            return {}
        return {"window_size_left": self.reach, "window_size_right": 0 if self.causal else -1}

    def place(self, device: torch.device) -> None:
        """Put the bounds on a device, once for all layers."""
        self.bounds = tuple(
            torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
            for lengths in (self.query_lengths(), self.key_lengths())
        )


def attend_block(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Attention within a block.

    Args:
        query: [m, heads, d].
        key: [l, kv_heads, d]; value alike.

    Returns:
        [m, heads, d], and [m, heads] logarithms of the sums of exponentials, in float32 or better.
    """
    if not _has_kernel(query):
        return _attend_plainly(query, key, value, block, scale)
    key, value = (_for_each_query_head(x, query) for x in (key, value))
    output, normaliser, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *block.bounds, max(block.query_lengths()), max(block.key_lengths()), 0.0, block.causal,
        False, scale=scale, **block.sides())  # fmt: skip
    return output, normaliser.T


def attend_block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normaliser: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, of the part that the block's keys have in attention over more keys.

    Args:
        grad: [m, heads, d], of `output`.
        output: [m, heads, d], over all keys.
        normaliser: [m, heads], over all keys.
    """
    if not _has_kernel(query):
        return _attend_plainly_backward(grad, query, key, value, output, normaliser, block, scale)
    heads, unused = key.shape[1], torch.zeros(2, dtype=torch.uint64, device=query.device)
    key, value = (_for_each_query_head(x, query) for x in (key, value))
    grads = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, output, normaliser.T.contiguous(), *block.bounds, max(block.query_lengths()),
        max(block.key_lengths()), 0.0, block.causal, unused, unused, scale=scale,
        **block.sides())  # fmt: skip
    return grads[0], *(g.unflatten(1, (heads, -1)).sum(2) for g in grads[1:])


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _for_each_query_head(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    outputs, normalisers = [], []
    for q, k, v in _documents(block, (query,), (key, value)):
        scores = _scores(q, k, block, scale)
        normaliser = scores.logsumexp(-1)
        weights = (scores - normaliser[..., None]).exp()
        outputs.append(torch.einsum("kgml,lkd->mkgd", weights, v.to(scores.dtype)).flatten(1, 2))
        normalisers.append(normaliser.flatten(0, 1).T)
    return torch.cat(outputs), torch.cat(normalisers)


def _attend_plainly_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normaliser: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 2, a document at once."""
    found = []
    heads = (key.shape[1], -1)
    for g, q, o, n, k, v in _documents(block, (grad, query, output, normaliser), (key, value)):
        scores = _scores(q, k, block, scale)
        q, g, o = (x.to(scores.dtype).unflatten(1, heads) for x in (q, g, o))
        k, v = (x.to(scores.dtype) for x in (k, v))
        weights = (scores - n.T.unflatten(0, heads)[..., None]).exp()
        grad_weights = torch.einsum("mkgd,lkd->kgml", g, v)
        grad_scores = weights * (grad_weights - (g * o).sum(-1).permute(1, 2, 0)[..., None]) * scale
        grad_query = torch.einsum("kgml,lkd->mkgd", grad_scores, k).flatten(1, 2)
        grad_key, grad_value = (torch.einsum("kgml,mkgd->lkd", *pair) for pair in ((grad_scores, q), (weights, g)))
        found.append((grad_query, grad_key, grad_value))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _documents(block: Block, of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]) -> zip:
    """The tensors cut by document."""
    cut = [x.split(block.query_lengths()) for x in of_queries] + [x.split(block.key_lengths()) for x in of_keys]
    return zip(*cut, strict=True)


def _scores(query: Tensor, key: Tensor, block: Block, scale: float) -> Tensor:
    """[kv_heads, query heads of each, m, l], in float32 or better."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(dtype).unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("mkgd,lkd->kgml", grouped, key.to(dtype)) * scale
    m, n = scores.shape[-2:]
    everything = torch.ones(m, n, dtype=torch.bool, device=scores.device)
    if block.causal:
        scores = scores.masked_fill(everything.triu(1), -torch.inf)
    if block.reach is not None:
        scores = scores.masked_fill(everything.tril(n - m - block.reach - 1), -torch.inf)
    return scores
