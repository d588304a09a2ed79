"""Losses over packed rows of tokens: policy gradients, cross-entropy, reference KL (formulas in docs/algorithms.md)."""

from prime_hpc.algorithms.losses.custom import LossInputs, LossOutputs
from prime_hpc.algorithms.losses.tensors import Metrics, MicroBatchTensors, TokenCounts, count_tokens
from prime_hpc.algorithms.losses.total import compute_loss

__all__ = [
    "LossInputs",
    "LossOutputs",
    "Metrics",
    "MicroBatchTensors",
    "TokenCounts",
    "compute_loss",
    "count_tokens",
]
