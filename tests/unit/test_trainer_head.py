"""The LM head that never holds all logits."""

import pytest
import torch
from torch import Tensor

from prime_hpc.trainer.head import score_tokens


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, 4, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.tensor([0, 6, 3, 3, 1]), torch.rand(5, dtype=dtype) + 0.5


@pytest.mark.parametrize("cap", [None, 1.5])
def test_gradients_are_those_of_finite_differences(cap):
    hidden, weight, targets, temperatures = make_inputs(torch.float64)

    def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return score_tokens(hidden, weight, targets, temperatures, chunk=2, cap=cap)

    assert torch.autograd.gradcheck(scores, (hidden, weight))


@pytest.mark.parametrize("chunk", [1, 2, 5, 8])
def test_scores_and_gradients_equal_those_of_full_logits(chunk):
    hidden, weight, targets, temperatures = make_inputs(torch.float32)
    full = ((hidden @ weight.T) / temperatures[:, None]).log_softmax(-1)
    expected = full.gather(-1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    scores = score_tokens(hidden, weight, targets, temperatures, chunk)
    upstream = torch.randn(2, 5)
    found = []
    for logprobs, entropy in (scores, expected):
        total = (logprobs * upstream[0] + entropy * upstream[1]).sum()
        found.append([logprobs, entropy, *torch.autograd.grad(total, (hidden, weight))])
    for actual, wanted in zip(*found, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
