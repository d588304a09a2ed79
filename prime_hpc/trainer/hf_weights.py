"""Weights from a Hugging Face directory into sharded parameters: every rank reads its own slices and no more."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prime_hpc.errors import CorruptData

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def load_weights(model: nn.Module, directory: Path) -> None:
    """Fill the parameters and persistent buffers of `model` from the safetensors files of `directory`.

    Raises:
        CorruptData: a tensor is missing or has another shape; its name is in the text.
    """
    files = _locate(directory)
    with ExitStack() as stack, torch.no_grad():
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in set(files.values())}
        for name, target in _targets(model):
            if name not in files:
                raise CorruptData(f"{directory} holds no tensor {name}: it is not a checkpoint of this architecture")
            stored = opened[files[name]].get_slice(name)
            if tuple(stored.get_shape()) != tuple(target.shape):
                raise CorruptData(f"{name} in {files[name]} has shape {stored.get_shape()}, "
                                  f"config.json makes it {list(target.shape)}")  # fmt: skip
            local, slices = _local_part(target)
            if local.numel():
                local.copy_(stored[slices])


def _targets(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    persistent = model.state_dict(keep_vars=True).keys()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """This rank's shard and where it lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, n) for n in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _locate(directory: Path) -> dict[str, Path]:
    """Name of every tensor -> file that holds it."""
    if (directory / INDEX).exists():
        names = json.loads((directory / INDEX).read_text())["weight_map"]
        return {name: directory / file for name, file in names.items()}
    if not (directory / SINGLE).exists():
        raise CorruptData(f"{directory} has neither {SINGLE} nor {INDEX}: model.path wants weights in safetensors")
    with safe_open(directory / SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), directory / SINGLE)
