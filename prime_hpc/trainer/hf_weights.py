"""Weights from a Hugging Face directory into sharded parameters: every rank reads its own slices and no more."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prime_hpc.errors import CorruptData
from prime_hpc.models.conversion import Conversion, Piece
from prime_hpc.models.decoder import CausalLM
from prime_hpc.models.lora import adapter_of
from prime_hpc.models.tensor_index import locate
from prime_hpc.trainer.policy import PolicyModel


def load_weights(model: PolicyModel | CausalLM, directory: Path) -> None:
    """Fill the parameters and persistent buffers of `model` from the safetensors files of `directory`.

    Raises:
        ConfigurationError: a file is missing.
        CorruptData: a tensor is missing or has another shape; its name is in the text.
    """
    load_tensors(dict(named_weights(model)), model.conversion, directory)


def load_tensors(targets: dict[str, torch.Tensor], conversion: Conversion, directory: Path) -> None:
    """Fill tensors of a model, by their names there, from the safetensors files of `directory`.

    Raises:
        ConfigurationError: a file is missing.
        CorruptData: a tensor is missing or has another shape; its name is in the text.
    """
    files = locate(directory)
    with ExitStack() as stack, torch.no_grad():
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in set(files.values())}
        for name, target in targets.items():
            local, slices = local_part(target)
            for piece in conversion.pieces(name, target.shape):
                if piece.name not in files:
                    raise CorruptData(
                        f"{directory} holds no tensor {piece.name}: it is not a checkpoint of this architecture"
                    )
                stored = opened[files[piece.name]].get_slice(piece.name)
                expected = piece.shape(target.shape)
                if tuple(stored.get_shape()) != expected:
                    raise CorruptData(f"{piece.name} in {files[piece.name]} has shape {stored.get_shape()}, "
                                      f"config.json makes it {list(expected)}")  # fmt: skip
                _copy(stored, piece, local, slices)


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint holds of a model: its parameters but for adapters, then its persistent buffers."""
    persistent = model.state_dict(keep_vars=True).keys()
    yield from ((name, p) for name, p in model.named_parameters() if adapter_of(name) is None)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _copy(stored: Any, piece: Piece, local: torch.Tensor, slices: tuple[slice, ...]) -> None:
    """Read what of a piece belongs to `local`, which lies at `slices` of the native tensor."""
    if not local.numel():
        return
    if piece.index is not None:
        entries, *slices = slices
        if not entries.start <= piece.index < entries.stop:
            return
        local = local[piece.index - entries.start]
    if piece.rows is None:
        local.copy_(stored[tuple(slices)])
        return
    mine, *others = slices
    begin, end = max(piece.rows.start, mine.start), min(piece.rows.stop, mine.stop)
    if begin < end:
        wanted = slice(begin - piece.rows.start, end - piece.rows.start)
        local[begin - mine.start : end - mine.start].copy_(stored[(wanted, *others)])


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """This rank's shard and where it lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, n) for n in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
