"""Activations that wait for the backward pass in host memory."""

from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 2**20
"""Bytes under which a tensor stays where it is: its copy would take longer to start than to run."""


@dataclass(eq=False)
class _Kept:
    """A tensor that the backward pass will ask for; `tensor` is None while it lies on the host only."""

    tensor: Tensor | None
    host: Tensor
    copied: torch.cuda.Event | None = None
    """The end of its last copy."""


class ActivationOffload:
    """Copies what blocks keep to the host while the device computes on, and back before the backward pass asks.

    At most `in_flight` tensors are on their way to the host: the device waits for the oldest before it keeps another,
    lest what is to be freed pile up. As many are fetched ahead, the last kept first.
    """

    def __init__(self, device: torch.device, in_flight: int, smallest: int = SMALLEST):
        self._device, self._in_flight, self._smallest = device, in_flight, smallest
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[_Kept] = deque()
        self._kept: list[_Kept] = []

    def wrap(self, block: nn.Module) -> None:
        """Offload what `block` keeps in its forward pass, its weights excepted."""
        forward = block.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, weights), self._unpack):
                return forward(*args, **kwargs)

        block.forward = offloaded

    def _pack(self, tensor: Tensor, weights: Set[int]) -> Tensor | _Kept:
        small = tensor.numel() * tensor.element_size() < self._smallest
        if small or tensor.device != self._device or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        if len(self._leaving) == self._in_flight:
            oldest = self._leaving.popleft()
            self._wait_for(oldest)
            oldest.tensor = None
        kept = _Kept(tensor, torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None))
        self._copy(kept, to_host=True)
        self._leaving.append(kept)
        self._kept.append(kept)
        return kept

    def _unpack(self, saved: Tensor | _Kept) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._leaving.clear()
        place = self._kept.index(saved)
        for kept in reversed(self._kept[max(0, place - self._in_flight) : place + 1]):
            if kept.tensor is None:
                kept.tensor = torch.empty_like(kept.host, device=self._device)
                self._copy(kept, to_host=False)
        del self._kept[place]
        self._wait_for(saved)
        assert saved.tensor is not None
        return saved.tensor

    def _copy(self, kept: _Kept, *, to_host: bool) -> None:
        """Start the copy, on a stream of its own where there is one."""
        source, target = (kept.tensor, kept.host) if to_host else (kept.host, kept.tensor)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if self._stream is not None:
            kept.tensor.record_stream(self._stream)
            kept.copied = self._stream.record_event()

    def _wait_for(self, kept: _Kept) -> None:
        """Let the device go on only when the last copy has ended."""
        if kept.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(kept.copied)
