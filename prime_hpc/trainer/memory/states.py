"""Optimiser states that lie in host memory between steps."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def keep_on_host(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Bring the states of `optimizer` to `device` for every step, and back to the host after it.

    Saves them from forward and backward pass, where memory is short, for two copies a step.
    """

    def bring(*_: Any) -> None:
        move(optimizer, device)

    def send(*_: Any) -> None:
        move(optimizer, torch.device("cpu"))

    optimizer.register_step_pre_hook(bring)
    optimizer.register_step_post_hook(send)


def move(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move this rank's states to `device`, those of matrices: a scalar stays where its optimiser wants it."""
    for state, name, tensor in _states(optimizer):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device == device:
            continue
        target = torch.empty_like(local, device=device, pin_memory=device.type == "cpu" and local.is_cuda)
        target.copy_(local, non_blocking=True)
        if isinstance(tensor, DTensor):
            tensor._local_tensor = target  # a new DTensor would be moved to the device of its mesh
        else:
            state[name] = target
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for state in optimizer.state.values():
        for name, value in list(state.items()):
            if isinstance(value, Tensor) and value.ndim:
                yield state, name, value
