"""The LM head that never holds all logits."""

import torch

from prime_hpc.trainer.head import score_tokens


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets, temperatures = torch.tensor([0, 6, 3, 3, 1]), torch.rand(5, dtype=torch.float64) + 0.5

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return score_tokens(hidden, weight, targets, temperatures, chunk=2)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, weight))
