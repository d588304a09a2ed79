"""A loss of the user's, by import path; it sees one sequence at a time."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from prime_hpc.algorithms.imports import import_function
from prime_hpc.algorithms.losses.tensors import Metrics, MicroBatchTensors, pair
from prime_hpc.config.loss import CustomLoss


@dataclass(frozen=True)
class LossInputs:
    """One sequence of k tokens, as a custom loss sees it; tensors are [k], `loss_mask` bool holds the member tokens.

    A sequence may have no member: its loss is then 0 and finite, still depending on `trainer_logprobs`.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


@dataclass(frozen=True)
class LossOutputs:
    """A custom loss: the *sum* over the sequence's member tokens (weights applied), and scalar metrics."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def custom_loss(logprobs: Tensor, tensors: MicroBatchTensors, config: CustomLoss) -> tuple[Tensor, Metrics]:
    """Call the user's function on every sequence; a metric's count is the number of sequences.

    Raises:
        ConfigurationError: the function cannot be imported.
    """
    expected = "`module.function` of a loss that takes LossInputs and returns LossOutputs"
    function = import_function(config.import_path, "loss.import_path", expected)
    streams = (logprobs, tensors.logprobs, tensors.ref_logprobs, tensors.advantages, tensors.rl_members,
               tensors.rl_weights)  # fmt: skip
    split = [[None] * len(tensors.seq_lens) if s is None else s.split(tensors.seq_lens) for s in streams]
    outputs = [function(LossInputs(*parts), **config.kwargs) for parts in zip(*split, strict=True)]
    names = sorted({name for output in outputs for name in output.metrics})
    metrics: Metrics = {}
    for name in names:
        values = torch.stack([o.metrics[name].detach().double() for o in outputs if name in o.metrics])
        metrics[name] = pair(values, torch.ones_like(values, dtype=torch.bool))
    return torch.stack([output.loss for output in outputs]).sum(), metrics
