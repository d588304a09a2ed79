"""A packed row with golden values, and a run of a loss over it."""

import torch

from prime_hpc.algorithms.losses import MicroBatchTensors, TokenCounts, compute_loss
from prime_hpc.config.loss import DPPOLoss, LossConfig
from prime_hpc.transport.messages import PolicyVersion

LOGPROBS = [-0.10, -0.90, -2.00, -0.50, -0.05, -3.00, -1.20, -0.30, -0.70, -1.60]
SAMPLER = [-0.20, -0.40, -2.30, -1.50, -0.06, -2.50, -0.90, -0.80, -0.70, -0.40]
REFERENCE = [-0.30, -0.60, -1.80, -0.40, -0.10, -2.00, -1.00, -0.50, -0.20, -1.10]
ADVANTAGES = [1.0, 1.0, -1.0, 1.0, 0.5, -0.5, -2.0, 0.0, 1.5, -1.0]
MASK = [0, 1, 1, 1, 1, 1, 1, 1, 0, 1]
GRADIENT = [0, -0.07594133, 0.16880735, 0.00025, -0.06312564, 0.03778317, 0.18512956, 0.000125, 0, -0.0003]
CURRENT = PolicyVersion(0, 4).pack()


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(mask=MASK, seq_lens=(6, 4), **streams) -> MicroBatchTensors:
    """The golden row, or another of the same values with other streams."""
    n = len(mask)
    defaults = dict(
        token_ids=torch.arange(n),
        position_ids=torch.arange(n),
        mask=torch.tensor(mask, dtype=torch.bool),
        logprobs=double(SAMPLER[:n]),
        versions=torch.full((n,), CURRENT),
        advantages=double(ADVANTAGES[:n]),
        temperatures=torch.ones(n),
        seq_lens=list(seq_lens),
        sources=["a"] * len(seq_lens),
    )
    return MicroBatchTensors(**{**defaults, **streams})


def run(tensors: MicroBatchTensors, counts: TokenCounts, config: LossConfig | None = None, logprobs=None):
    """Loss, gradient and metrics as Python numbers."""
    logprobs = double(LOGPROBS[: len(tensors.mask)] if logprobs is None else logprobs).requires_grad_()
    loss, metrics = compute_loss(logprobs, None, tensors, config or DPPOLoss(), counts, CURRENT)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), {k: (s.item(), n.item()) for k, (s, n) in metrics.items()}
