"""Whole tensors in Hugging Face names as safetensors files: every rank gathers all of them and writes its share."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor, nn

from prime_hpc.models.conversion import Conversion
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.hf_weights import INDEX, SINGLE, named_weights
from prime_hpc.trainer.lora import merge
from prime_hpc.trainer.lora import whole as whole_values
from prime_hpc.trainer.model import PolicyModel
from prime_hpc.transport import delta
from prime_hpc.transport.weights import DELTA_SUFFIX, FileEntry

FILE_BYTES = 2 * 2**30
"""Size of one safetensors file, about: what a rank holds at once while it writes."""

Write = Callable[[Path, bytes], None]


class Written(NamedTuple):
    """Entries of the files of a version, and of deltas that lead to them from the version before, if there are any."""

    files: dict[str, FileEntry]
    deltas: dict[str, FileEntry]


class FileWriter:
    """Writes versions of a policy. With `remember` each rank keeps its files in memory to tell what changes in them."""

    def __init__(self, policy: PolicyModel, world: World, dtype: str, write: Write, *, remember: bool):
        self._policy, self._world = policy, world
        self._dtype = getattr(torch, dtype)
        self._write_bytes = write
        self._last: dict[str, delta.Bytes] | None = {} if remember else None

    def write(self, directory: Path, *, whole: bool) -> Written:
        """Write files and deltas into `directory`, which exists; returns, alike on all ranks, once all are there."""
        tensors = dict(named_weights(self._policy))
        files = divide({name: t.numel() * self.published_dtype(t).itemsize for name, t in tensors.items()})
        written = Written({}, {})
        for i, (file, names) in enumerate(files.items()):
            mine = i % self._world.size == self._world.rank
            kept = self._gather({name: tensors[name] for name in names}, keep=mine)
            if mine:
                self._write_file(directory / file, save(kept, {"format": "pt"}), written, whole=whole)
        if self._world.first and whole and len(files) > 1:
            write_index(directory, files, tensors, self._policy.conversion)
        parts = gather([written.files, written.deltas])
        return Written(*({name: FileEntry(**entry) for part in parts for name, entry in part[kind].items()}
                         for kind in (0, 1)))  # fmt: skip

    def forget(self) -> None:
        """What is written from now on is no version that follows the last one."""
        self._last = None

    def published_dtype(self, tensor: Tensor) -> torch.dtype:
        """Buffers keep their precision: a rounded score correction would route tokens otherwise than in training."""
        return self._dtype if isinstance(tensor, nn.Parameter) else tensor.dtype

    def whole_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor from the shards of all ranks, in the dtype that is published, merged with an adapter if any."""
        dtype, lora = self.published_dtype(tensor), self._policy.lora
        if lora and name in lora.updates:
            return merge(lora, name, whole_values(tensor), lora.adapters[0]).to(dtype)
        return whole_values(tensor.detach().to(dtype))

    def _gather(self, tensors: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
        """Gather tensor by tensor, on all ranks; the one whose file it is keeps them on its host."""
        kept = {}
        for name, tensor in tensors.items():
            values = self.whole_tensor(name, tensor)
            for hf_name, part in self._policy.conversion.to_hf(name, values).items() if keep else ():
                # a copy, as the file format refuses tensors that share memory
                kept[hf_name] = part.to("cpu", copy=True).contiguous()
        return kept

    def _write_file(self, path: Path, data: bytes, written: Written, *, whole: bool) -> None:
        written.files[path.name] = _entry(data)
        if whole:
            self._write_bytes(path, data)
        if self._last is None:
            return
        new = np.frombuffer(data, np.uint8)
        if path.name in self._last:
            changes = delta.encode(self._last[path.name], new)
            self._write_bytes(path.with_name(path.name + DELTA_SUFFIX), changes)
            written.deltas[path.name] = _entry(changes)
        self._last[path.name] = new


def make_directory(path: Path, world: World) -> None:
    """A new, empty directory; returns on every rank once it is there."""
    if world.first:
        path.mkdir(parents=True)
    dist.barrier()


def write_index(
    directory: Path, files: dict[str, list[str]], tensors: dict[str, Tensor], conversion: Conversion
) -> None:
    """Which of several files holds which tensor of the checkpoint's names."""
    weight_map = {piece.name: file for file, names in files.items() for name in names
                  for piece in conversion.pieces(name, tensors[name].shape)}  # fmt: skip
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """`save_file`, whose error hides that of the file system in its text."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), str(error)) from error if number else error


def divide(sizes: dict[str, int]) -> dict[str, list[str]]:
    """File name -> tensors in order, a new file wherever one would pass `FILE_BYTES`."""
    groups = group(sizes, FILE_BYTES)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def group(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, a new group wherever one would pass `limit` bytes."""
    groups: list[list[str]] = []
    free = -math.inf
    for name, size in sizes.items():
        if size > free:
            groups.append([])
            free = limit
        groups[-1].append(name)
        free -= size
    return groups


def _entry(data: bytes) -> FileEntry:
    return FileEntry(bytes=len(data), digest=blake3(data, max_threads=blake3.AUTO).hexdigest())
