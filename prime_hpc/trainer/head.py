"""Log-probabilities and entropy straight from hidden states; the full logits never exist."""

from typing import Any

import torch
from torch import Tensor


def score_tokens(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Score `targets` under softmax(hidden @ weight.T / temperature), `chunk` tokens at a time.

    Args:
        hidden: [m, h], the state from which each target is predicted.
        weight: [V, h] of the LM head.
        targets: int64[m].
        temperatures: float32[m]; its precision is that of logits and scores.
        chunk: rows of logits that exist at once.

    Returns:
        float32[m] log-probabilities, differentiable in `hidden` and `weight`, and float32[m] entropies in nats,
        without gradient.
    """
    return _Scores.apply(hidden, weight, targets, temperatures, chunk)


class _Scores(torch.autograd.Function):
    """Keeps one log-normaliser a token and makes the logits anew in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normaliser = (torch.empty_like(temperatures) for _ in range(3))
        for rows in _chunks(len(targets), chunk):
            logits = _logits(hidden[rows], weight, temperatures[rows])
            normaliser[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(-1, targets[rows, None])[:, 0] - normaliser[rows]
            entropy[rows] = normaliser[rows] - (logits.softmax(-1) * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperatures, normaliser)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=temperatures.dtype)
        for rows in _chunks(len(targets), ctx.chunk):
            probs = (_logits(hidden[rows], weight, temperatures[rows]) - normaliser[rows, None]).exp_()
            scale = grad[rows] / temperatures[rows]
            grad_logits = probs.mul_(-scale[:, None]).scatter_add_(-1, targets[rows, None], scale[:, None])
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """[rows, V] in the precision of the temperatures, divided by them."""
    return (hidden @ weight.T).to(temperatures.dtype).div_(temperatures[:, None])


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]
