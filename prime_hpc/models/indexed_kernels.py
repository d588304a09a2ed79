"""Kernels of attention over chosen keys (Triton): scores of an indexer, attention, and its gradient. Nothing that is
read for one query is written down, unlike in `indexed_plain`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORE_ROWS, SCORE_KEYS, SCORE_WARPS = 128, 128, 8
"""Rows are those of all heads of some queries."""
HEADS, KEYS, WARPS = 64, 64, 8
BACKWARD_HEADS, BACKWARD_KEYS, BACKWARD_WARPS = 32, 32, 8


def score(query: Tensor, key: Tensor, weights: Tensor, begins: Tensor, places: Tensor, first: int) -> Tensor:
    """`indexed_plain.score`."""
    (m, heads, d), n = query.shape, len(key)
    scores = torch.empty(m, n, device=query.device, dtype=torch.float32)
    queries = max(1, SCORE_ROWS // heads)
    _score[(triton.cdiv(m, queries), triton.cdiv(n, SCORE_KEYS))](
        query, key, weights, begins, places, scores, m, n, first, HEADS=heads, D=d, QUERIES=queries, KEYS=SCORE_KEYS,
        num_warps=SCORE_WARPS,
    )  # fmt: skip
    return scores


def attend(query: Tensor, keys: Tensor, chosen: Tensor, value_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """`indexed_plain.attend`."""
    m, heads, d = query.shape
    output = query.new_empty(m, heads, value_dim)
    normaliser = query.new_empty(m, heads, dtype=torch.float32)
    block = min(HEADS, heads)
    _attend[(m, heads // block)](
        query, keys, chosen, output, normaliser, scale, heads, chosen.shape[1], D=d, VALUE=value_dim, HEADS=block,
        KEYS=KEYS, num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return output, normaliser


def differentiate(grad: Tensor, query: Tensor, keys: Tensor, chosen: Tensor, output: Tensor, normaliser: Tensor,
                  scale: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`indexed_plain.differentiate`."""
    m, heads, d = query.shape
    by_query, by_keys = torch.empty_like(query), keys.new_zeros(keys.shape, dtype=torch.float32)
    inner = (grad.float() * output.float()).sum(-1)
    block = min(BACKWARD_HEADS, heads)
    _differentiate[(m, heads // block)](
        grad, query, keys, chosen, inner, normaliser, by_query, by_keys, scale, heads, chosen.shape[1], D=d,
        VALUE=output.shape[-1], HEADS=block, KEYS=BACKWARD_KEYS, num_warps=BACKWARD_WARPS, num_stages=1,
    )  # fmt: skip
    return by_query, by_keys


def fit(query: Tensor, value_dim: int) -> bool:
    """Whether the kernels take queries [m, heads, d]: in bfloat16, with sizes in powers of two, as tiles have them."""
    sizes = (query.shape[1], value_dim, query.shape[2] - value_dim or value_dim)
    return query.dtype == torch.bfloat16 and all(size >= 16 and size & (size - 1) == 0 for size in sizes)


@triton.jit
def _score(query, key, weights, begins, places, scores, m, n, first, HEADS: tl.constexpr, D: tl.constexpr,
           QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Some queries, with all their heads, and some keys."""
    rows = tl.program_id(0).to(tl.int64) * QUERIES * HEADS + tl.arange(0, QUERIES * HEADS)
    columns = tl.program_id(1).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    d = tl.arange(0, D)
    real = rows < m * HEADS
    q = tl.load(query + rows[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
    k = tl.load(key + columns[:, None] * D + d[None, :], mask=(columns < n)[:, None], other=0.0)
    weight = tl.load(weights + rows, mask=real, other=0.0)
    found = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0) * weight[:, None]
    total = tl.sum(tl.reshape(found, (QUERIES, HEADS, KEYS)), 1)
    queries = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    begin = tl.load(begins + queries, mask=queries < m, other=0)
    last = tl.load(places + queries, mask=queries < m, other=0)
    there = first + columns[None, :]
    total = tl.where((there >= begin[:, None]) & (there <= last[:, None]), total, float("-inf"))
    inside = (queries < m)[:, None] & (columns < n)[None, :]
    tl.store(scores + queries[:, None] * n + columns[None, :], total, mask=inside)


@triton.jit
def _attend(query, keys, chosen, output, normaliser, scale, heads, top_k, D: tl.constexpr, VALUE: tl.constexpr,
            HEADS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Some heads of one query: the softmax is summed as the keys come, scaled to the highest score so far."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    value, rest = tl.arange(0, VALUE), tl.arange(0, D - VALUE)
    query += (row * heads + head)[:, None] * D
    q_value, q_rest = tl.load(query + value[None, :]), tl.load(query + VALUE + rest[None, :])
    highest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    found = tl.zeros((HEADS, VALUE), tl.float32)
    for start in range(0, top_k, KEYS):
        place = start + tl.arange(0, KEYS)
        index = tl.load(chosen + row * top_k + place, mask=place < top_k, other=-1)
        real = index >= 0
        read = keys + tl.where(real, index, 0).to(tl.int64)[:, None] * D
        k_value, k_rest = tl.load(read + value[None, :]), tl.load(read + VALUE + rest[None, :])
        scores = tl.dot(q_value, tl.trans(k_value), input_precision="ieee")
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        scores = tl.where(real[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(highest - safe)
        probs = tl.exp(scores - safe[:, None])
        total = total * shrink + tl.sum(probs, 1)
        found = found * shrink[:, None] + tl.dot(probs.to(k_value.dtype), k_value, input_precision="ieee")
        highest = higher
    output += (row * heads + head)[:, None] * VALUE + value[None, :]
    tl.store(output, (found / total[:, None]).to(output.dtype.element_ty))
    tl.store(normaliser + row * heads + head, highest + tl.log(total))


@triton.jit
def _differentiate(grad, query, keys, chosen, inner, normaliser, by_query, by_keys, scale, heads, top_k,
                   D: tl.constexpr, VALUE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Some heads of one query; what they make of a key is added to that of others."""
    row = tl.program_id(0).to(tl.int64)
    head = row * heads + tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    value, rest = tl.arange(0, VALUE), tl.arange(0, D - VALUE)
    q_value = tl.load(query + head[:, None] * D + value[None, :])
    q_rest = tl.load(query + head[:, None] * D + VALUE + rest[None, :])
    upstream = tl.load(grad + head[:, None] * VALUE + value[None, :])
    mean, log_total = tl.load(inner + head), tl.load(normaliser + head)
    by_value = tl.zeros((HEADS, VALUE), tl.float32)
    by_rest = tl.zeros((HEADS, D - VALUE), tl.float32)
    for start in range(0, top_k, KEYS):
        place = start + tl.arange(0, KEYS)
        index = tl.load(chosen + row * top_k + place, mask=place < top_k, other=-1)
        real = index >= 0
        offset = tl.where(real, index, 0).to(tl.int64)[:, None] * D
        k_value = tl.load(keys + offset + value[None, :])
        k_rest = tl.load(keys + offset + VALUE + rest[None, :])
        scores = tl.dot(q_value, tl.trans(k_value), input_precision="ieee")
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        probs = tl.where(real[None, :], tl.exp(scores * scale - log_total[:, None]), 0.0)
        by_probs = tl.dot(upstream, tl.trans(k_value), input_precision="ieee")
        by_score = (probs * (by_probs - mean[:, None]) * scale).to(k_value.dtype)
        by_value += tl.dot(by_score, k_value, input_precision="ieee")
        by_rest += tl.dot(by_score, k_rest, input_precision="ieee")
        back = tl.dot(tl.trans(by_score), q_value, input_precision="ieee")
        back += tl.dot(tl.trans(probs.to(k_value.dtype)), upstream, input_precision="ieee")
        tl.atomic_add(by_keys + offset + value[None, :], back, mask=real[:, None], sem="relaxed")
        back = tl.dot(tl.trans(by_score), q_rest, input_precision="ieee")
        tl.atomic_add(by_keys + offset + VALUE + rest[None, :], back, mask=real[:, None], sem="relaxed")
    by_query += head[:, None] * D
    tl.store(by_query + value[None, :], by_value.to(by_query.dtype.element_ty))
    tl.store(by_query + VALUE + rest[None, :], by_rest.to(by_query.dtype.element_ty))
