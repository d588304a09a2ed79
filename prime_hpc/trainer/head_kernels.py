"""The arithmetic between the products of the LM head, in one pass over a chunk of logits each way (Triton).

In the precision of the temperatures, which is that of the scores; logits are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
WARPS = 16


def score(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`head.score`."""
    logprobs, entropy, normaliser = (torch.empty_like(temperatures) for _ in range(3))
    rows, vocabulary = logits.shape
    _score[(rows,)](logits, targets, temperatures, logprobs, entropy, normaliser, vocabulary, BLOCK=BLOCK,
                    num_warps=WARPS)  # fmt: skip
    return logprobs, entropy, normaliser


def differentiate(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad: Tensor,
    entropy_grad: Tensor,
) -> Tensor:
    """`head.differentiate`, in the place of `logits`."""
    rows, vocabulary = logits.shape
    tokens = (x.contiguous() for x in (targets, temperatures, normaliser, entropy, grad, entropy_grad))
    _differentiate[(rows, triton.cdiv(vocabulary, BLOCK))](logits, *tokens, vocabulary, BLOCK=BLOCK, num_warps=WARPS)
    return logits


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`head.accumulate`, without rounding the product to the precision of `a` and `b` in between."""
    torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@triton.jit
def _score(logits, targets, temperatures, logprobs, entropy, normaliser, vocabulary, BLOCK: tl.constexpr):
    """One row: the softmax and its entropy are summed as they come, scaled to the highest logit so far (Milakov and
    Gimelshein 2018, arXiv 1805.02867, algorithm 3)."""
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0 / tl.load(temperatures + row)
    logits += row * vocabulary
    highest = tl.full((), float("-inf"), inverse.dtype)
    total = tl.zeros((), inverse.dtype)
    weighted = tl.zeros((), inverse.dtype)
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        x = tl.load(logits + places, mask=inside, other=float("-inf")).to(inverse.dtype) * inverse
        higher = tl.maximum(highest, tl.max(x, 0))
        shrink = tl.exp(highest - higher)
        exponentials = tl.exp(x - higher)
        total = total * shrink + tl.sum(exponentials, 0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, exponentials * x, 0.0), 0)
        highest = higher
    log_total = highest + tl.log(total)
    target = tl.load(logits + tl.load(targets + row)).to(inverse.dtype) * inverse
    tl.store(logprobs + row, target - log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(normaliser + row, log_total)


@triton.jit
def _differentiate(
    logits, targets, temperatures, normaliser, entropy, grad, entropy_grad, vocabulary, BLOCK: tl.constexpr
):
    """A block of one row."""
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0 / tl.load(temperatures + row)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < vocabulary
    logits += row * vocabulary + places
    scores = tl.load(logits, mask=inside, other=0.0).to(inverse.dtype) * inverse - tl.load(normaliser + row)
    probs = tl.exp(scores)
    onehot = tl.where(places == tl.load(targets + row), 1.0, 0.0)
    by_logprob = tl.load(grad + row) * inverse * (onehot - probs)
    by_entropy = tl.load(entropy_grad + row) * inverse * probs * (scores + tl.load(entropy + row))
    tl.store(logits, (by_logprob - by_entropy).to(logits.dtype.element_ty), mask=inside)
