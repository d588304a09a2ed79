"""Where a rank's memory goes."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

GIB = 2**30


def memory_by_category(policy: nn.Module, optimizers: list[Optimizer], device: torch.device) -> dict[str, float]:
    """GiB on `device` of weights and optimiser states, which stay, and of `transient`: the most that a step took beside
    them for gathered weights, activations, gradients and logits; only weights and states where it is no GPU.
    """
    states = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()
              if isinstance(value, Tensor))  # fmt: skip
    held = {"weights": held_gib(policy.parameters(), device), "optimizer": held_gib(states, device)}
    if device.type != "cuda":
        return held
    peak = torch.cuda.max_memory_allocated(device) / GIB
    return {**held, "transient": peak - sum(held.values()), "peak": peak}


def held_gib(tensors: Iterable[Tensor], device: torch.device) -> float:
    """GiB of this rank's shards of `tensors` that lie on `device`."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local if t.device == device) / GIB
