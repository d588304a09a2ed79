"""Whole tensors in Hugging Face names as safetensors files: all ranks gather each of them, one writes it.

While a rank gathers its next file, threads hash and write those before.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from prime_hpc.config.model_files import INDEX, SINGLE
from prime_hpc.models.conversion import Conversion
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.hf_weights import named_weights
from prime_hpc.trainer.lora import merge
from prime_hpc.trainer.lora import whole as whole_values
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.transport import delta
from prime_hpc.transport.tensor_files import FileLayout
from prime_hpc.transport.weights import DELTA_SUFFIX, FileEntry, TensorEntry

FILE_BYTES = 1000 * 2**20
"""Size of a safetensors file, at most unless one tensor is larger. Pinned memory comes in powers of two: a whole GiB
and a header would take two."""
LEAST_FILE_BYTES = 64 * 2**20
FILES_A_RANK = 4
"""At least so many, unless they would be smaller than that: with one there would be nothing to gather meanwhile."""
WRITERS = 2
"""Threads of a rank that hash and write. It holds one file more than that."""

Write = Callable[[Path, memoryview], None]


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
        sizes = {name: t.numel() * self.published_dtype(t).itemsize for name, t in named_weights(policy)}
        self._files = divide(sizes, file_bytes(sum(sizes.values()), world.size))
        self._layouts = self._lay_out(sizes)

    def write(self, directory: Path, *, whole: bool) -> Written:
        """Write files and deltas into `directory`, which exists; returns, alike on all ranks, once all are there."""
        tensors, pending = dict(named_weights(self._policy)), []
        with ThreadPoolExecutor(WRITERS) as threads:
            for file, names in self._files.items():
                gathered = self.gather({name: tensors[name] for name in names})
                if file not in self._layouts:
                    for _ in gathered:
                        pass
                    continue
                image, path = self._images.get(), directory / file
                arrived = self._fill(image, self._layouts[file], gathered)
                pending.append(threads.submit(self._finish, path, image, arrived, whole=whole))
        if self._world.first and whole and len(self._files) > 1:
            write_index(directory, self._files, tensors, self._policy.conversion)
        return _unite([job.result() for job in pending])

    def forget(self) -> None:
        """What is written from now on is no version that follows the last one."""
        self._last = None

    def published_dtype(self, tensor: Tensor) -> torch.dtype:
        """Buffers keep their precision: a rounded score correction would route tokens otherwise than in training."""
        return self._dtype if isinstance(tensor, nn.Parameter) else tensor.dtype

    def entries(self, name: str, tensor: Tensor) -> Iterator[TensorEntry]:
        """The Hugging Face tensors that a native one is published as."""
        dtype = str(self.published_dtype(tensor)).removeprefix("torch.")
        for piece in self._policy.conversion.pieces(name, tensor.shape):
            yield TensorEntry(piece.name, dtype, list(piece.shape(tensor.shape)))

    def whole_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor from the shards of all ranks, in the dtype that is published, merged with an adapter if any."""
        dtype, lora = self.published_dtype(tensor), self._policy.lora
        if lora and name in lora.updates:
            return merge(lora, name, whole_values(tensor), lora.adapters[0]).to(dtype)
        return whole_values(tensor.detach().to(dtype))

    def gather(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by Hugging Face names, one native tensor after the other; all ranks must take all of them."""
        for name, tensor in tensors.items():
            yield from self._policy.conversion.to_hf(name, self.whole_tensor(name, tensor)).items()

    def _lay_out(self, sizes: dict[str, int]) -> dict[str, FileLayout]:
        """The files that this rank writes."""
        owners = deal({file: sum(sizes[name] for name in names) for file, names in self._files.items()},
                      self._world.size)  # fmt: skip
        tensors = dict(named_weights(self._policy))
        return {file: FileLayout.of(entry for name in names for entry in self.entries(name, tensors[name]))
                for file, names in self._files.items() if owners[file] == self._world.rank}  # fmt: skip

    @cached_property
    def _images(self) -> SimpleQueue[Tensor]:
        """Memory for files on their way to the disk, the same for every version: new pages cost more than a copy, and a
        GPU fills pinned ones faster."""
        images: SimpleQueue[Tensor] = SimpleQueue()
        largest, pinned = max(layout.nbytes for layout in self._layouts.values()), self._world.device.type == "cuda"
        for _ in range(WRITERS + 1):
            images.put(torch.empty(largest, dtype=torch.uint8, pin_memory=pinned))
        return images

    def _fill(
        self, image: Tensor, layout: FileLayout, tensors: Iterable[tuple[str, Tensor]]
    ) -> torch.cuda.Event | None:
        """Put a file together; the event comes when a device, which copies on by itself, has done its part."""
        image[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
        for name, tensor in tensors:
            layout.view(image, name).copy_(tensor, non_blocking=True)
        on_gpu = self._world.device.type == "cuda"
        return torch.cuda.current_stream(self._world.device).record_event() if on_gpu else None

    def _finish(self, path: Path, image: Tensor, arrived: torch.cuda.Event | None, *, whole: bool) -> Written:
        """Hash and write a file, and what changed in it; in a thread of its own."""
        try:
            if arrived:
                arrived.synchronize()
            data = image[: self._layouts[path.name].nbytes].numpy()
            if whole:
                self._write_bytes(path, data.data)
            return Written({path.name: _entry(data.data)}, self._write_changes(path, data))
        finally:
            self._images.put(image)

    def _write_changes(self, path: Path, data: delta.Bytes) -> dict[str, FileEntry]:
        if self._last is None:
            return {}
        before = self._last.get(path.name)
        if before is None:
            self._last[path.name] = data.copy()
            return {}
        changes = memoryview(delta.encode(before, data))
        self._write_bytes(path.with_name(path.name + DELTA_SUFFIX), changes)
        np.copyto(before, data)
        return {path.name: _entry(changes)}


def _unite(parts: list[Written]) -> Written:
    """What all ranks have written; all of them must ask."""
    mine = [{name: entry for part in parts for name, entry in part[kind].items()} for kind in (0, 1)]
    return Written(*({name: FileEntry(**entry) for part in gather(mine) for name, entry in part[kind].items()}
                     for kind in (0, 1)))  # fmt: skip


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


def file_bytes(total: int, ranks: int) -> int:
    """Size of the files of `total` bytes that `ranks` write together."""
    return max(LEAST_FILE_BYTES, min(FILE_BYTES, total // (FILES_A_RANK * ranks)))


def divide(sizes: dict[str, int], limit: int = FILE_BYTES) -> dict[str, list[str]]:
    """File name -> tensors in order, a new file wherever one would pass `limit` bytes."""
    groups = group(sizes, limit)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def deal(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Rank of each file, the largest first, each to the rank with the fewest bytes so far."""
    loads, owners = [0] * ranks, {}
    for file in sorted(sizes, key=lambda file: -sizes[file]):
        owners[file] = loads.index(min(loads))
        loads[owners[file]] += sizes[file]
    return owners


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


def _entry(data: memoryview) -> FileEntry:
    return FileEntry(bytes=len(data), digest=blake3(data, max_threads=blake3.AUTO).hexdigest())
