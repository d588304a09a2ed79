"""Log-probabilities and entropy straight from hidden states; the full logits never exist."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Differentiate = Callable[..., Tensor]
Accumulate = Callable[[Tensor, Tensor, Tensor], None]


def score_tokens(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Score `targets` under softmax(logits / temperature) with logits = hidden @ weight.T, `chunk` tokens at a time.

    Args:
        hidden: [m, h], the state from which each target is predicted.
        weight: [V, h] of the LM head.
        targets: int64[m].
        temperatures: float32[m]; its precision is that of logits and scores.
        chunk: rows of logits that exist at once.
        cap: of the logits, which become cap * tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2).

    Returns:
        float32[m] log-probabilities and float32[m] entropies in nats, both differentiable in `hidden` and `weight`.
    """
    return _Scores.apply(hidden, weight, targets, temperatures, chunk, cap)


def soften(logits: Tensor, cap: float | None) -> Tensor:
    """Logits under a soft cap, if any."""
    return logits if cap is None else cap * (logits / cap).tanh()


@torch.no_grad()
def rate_tokens(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """float32[m] log-probabilities as `score_tokens` has them, and whether each target is the likeliest, as 0 or 1."""
    logprobs, hits = torch.empty_like(temperatures), torch.empty_like(temperatures)
    score, *_ = _passes(hidden.device)
    for rows in _chunks(len(targets), chunk):
        logits = soften(hidden[rows] @ weight.T, cap)
        hits[rows] = (logits.argmax(-1) == targets[rows]).to(hits.dtype)
        logprobs[rows], *_ = score(logits, targets[rows], temperatures[rows])
    return logprobs, hits


class _Scores(torch.autograd.Function):
    """Keeps two numbers a token and makes the logits anew in the backward pass: one product of matrices more, since
    the gradient of the weight is a sum over tokens that a policy gradient weights only once it knows all scores."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normaliser = (torch.empty_like(temperatures) for _ in range(3))
        score, *_ = _passes(hidden.device)
        for rows in _chunks(len(targets), chunk):
            logits = soften(hidden[rows] @ weight.T, cap)
            logprobs[rows], entropy[rows], normaliser[rows] = score(logits, targets[rows], temperatures[rows])
        ctx.save_for_backward(hidden, weight, targets, temperatures, normaliser, entropy)
        ctx.chunk, ctx.cap = chunk, cap
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *tokens = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if ctx.needs_input_grad[1] else None
        _, differentiate, accumulate = _passes(hidden.device)
        for rows in _chunks(len(hidden), ctx.chunk):
            logits = soften(hidden[rows] @ weight.T, ctx.cap)
            slope = 1.0 if ctx.cap is None else 1 - (logits / ctx.cap) ** 2
            grad_logits = differentiate(logits, *(t[rows] for t in (*tokens, grad, entropy_grad)))
            grad_logits = grad_logits if ctx.cap is None else grad_logits * slope
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                accumulate(grad_weight, grad_logits.T, hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _passes(device: torch.device) -> tuple[Score, Differentiate, Accumulate]:
    """How a chunk of logits becomes scores and gradients, and how those of the weight are summed."""
    if device.type != "cuda":
        return score, differentiate, accumulate
    from prime_hpc.trainer import head_kernels

    return head_kernels.score, head_kernels.differentiate, head_kernels.accumulate


def score(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and log-normaliser of every row."""
    scaled = logits.to(temperatures.dtype) / temperatures[:, None]
    normaliser = scaled.logsumexp(-1)
    entropy = normaliser - ((scaled - normaliser[:, None]).exp() * scaled).sum(-1)
    return scaled.gather(-1, targets[:, None])[:, 0] - normaliser, entropy, normaliser


def differentiate(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad: Tensor,
    entropy_grad: Tensor,
) -> Tensor:
    """Gradient of the logits: that of a log-probability is onehot - p, that of the entropy -p (log p + entropy)."""
    scores = logits.to(temperatures.dtype) / temperatures[:, None] - normaliser[:, None]
    probs = scores.exp()
    onehot = targets[:, None] == torch.arange(logits.shape[-1], device=logits.device)
    by_logprob = (grad / temperatures)[:, None] * (onehot.to(probs.dtype) - probs)
    by_entropy = (entropy_grad / temperatures)[:, None] * probs * (scores + entropy[:, None])
    return (by_logprob - by_entropy).to(logits.dtype)


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b"""
    total += a @ b


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]
