"""Trainer against sampler."""

from dataclasses import dataclass

import torch
from torch import Tensor

from prime_hpc.algorithms.losses.tensors import MicroBatchTensors


@dataclass(frozen=True)
class Ratio:
    """The importance ratio r of each token [n], as its logarithm; zeros (ratio 1) where no component needs it."""

    log: Tensor
    delta: Tensor
    """Difference of probabilities, without gradient."""
    k3: Tensor
    """`r - log r - 1`, without gradient: an unbiased estimate of KL(sampler || trainer) (Schulman 2020)."""

    @classmethod
    def of(cls, logprobs: Tensor, tensors: MicroBatchTensors) -> "Ratio":
        scored = tensors.mask | tensors.ref_kl_members
        log = torch.where(scored, logprobs - tensors.logprobs, 0.0)
        still = log.detach()
        delta = torch.where(scored, logprobs.detach().exp() - tensors.logprobs.exp(), 0.0)
        return cls(log, delta, still.exp() - still - 1)


def exp_where(keep: Tensor, log: Tensor) -> Tensor:
    """exp(log) on `keep` and 0 elsewhere; masked before exp, where an overflow would make the gradient NaN."""
    return torch.where(keep, torch.where(keep, log, 0.0).exp(), 0.0)
