"""Checksums of a model as it lies in memory, to tell two loads of the same weights apart."""

import torch
from blake3 import blake3


def checksums(model: torch.nn.Module) -> dict[str, str]:
    """Name of each parameter and buffer -> blake3 of its bytes, hex."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: checksum(tensor) for name, tensor in named}


def checksum(tensor: torch.Tensor) -> str:
    """blake3 of a tensor's bytes, hex."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return blake3(raw.cpu().numpy().data, max_threads=blake3.AUTO).hexdigest()
