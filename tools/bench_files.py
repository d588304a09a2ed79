"""What it costs to write a version of the weights and to read it again, whole and as a delta, without an engine.

One JSON object on rank 0's output: `torchrun --nproc-per-node 2 -m tools.bench_files --shape 0.6b`.

`in_turn` is what writing whole is compared with: all tensors gathered, then saved by rank 0, then hashed.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from prime_hpc.config.run import RunConfig
from prime_hpc.inference.host_copy import HostCopy
from prime_hpc.models.degrees import choose_degrees
from prime_hpc.trainer.bench import initialise
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import named_weights
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.weights_files import FileWriter, make_directory
from prime_hpc.transport.weights import Delta, WeightsManifest, entry_of, read_manifest, verify, write_manifest
from tools.bench_weights import SHAPES
from tools.check_parallel import join
from tools.weights_rig import nudge

DTYPE = "bfloat16"


class Bench:
    """Versions of one policy under `root`, one after the other. The first rank is also the engine."""

    def __init__(self, root: Path, policy: PolicyModel, world: World):
        self._root, self._policy, self._world = root, policy, world
        self._whole, self._delta = (FileWriter(policy, world, DTYPE, put, remember=remember)
                                    for remember in (False, True))  # fmt: skip
        self._copy = HostCopy(root / "copy")
        self._step = 0
        self._write(self._delta, whole=True)
        if world.first:
            self._copy.bring(self._directory)

    def measure(self, share: float) -> dict[str, float]:
        """Seconds for an update that changes a share of all elements, and the part of the bytes that a delta moves."""
        self._clear()
        self._step += 1
        nudge(self._policy, share, self._step * self._world.size + self._world.rank)
        times = {"write_in_turn_s": self._timed(self._write_in_turn),
                 "write_whole_s": self._timed(lambda: self._write(self._whole, whole=True)),
                 "read_whole_s": self._timed(lambda: take(self._directory), everyone=False)}  # fmt: skip
        self._clear()
        times["write_delta_s"] = self._timed(lambda: self._write(self._delta, whole=False))
        times["read_delta_s"] = self._timed(lambda: take(self._copy.bring(self._directory)), everyone=False)
        manifest = read_manifest(self._directory)
        moved, whole = (
            sum(entry.bytes for entry in files.values()) for files in (manifest.delta.files, manifest.files)
        )
        return {"bytes": moved / whole, **times}

    @property
    def _directory(self) -> Path:
        return self._root / f"v0.{self._step}"

    def _write(self, writer: FileWriter, *, whole: bool) -> None:
        make_directory(self._directory, self._world)
        written = writer.write(self._directory, whole=whole)
        if self._world.first:
            delta = Delta(base=f"0.{self._step - 1}", files=written.deltas) if written.deltas else None
            write_manifest(self._directory, WeightsManifest(version=f"0.{self._step}", dtype=DTYPE, whole=whole,
                                                            files=written.files, delta=delta))  # fmt: skip
        dist.barrier()

    def _write_in_turn(self) -> None:
        gathered = self._whole.gather(dict(named_weights(self._policy)))
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in gathered if self._world.first}
        if self._world.first:
            save_file(tensors, self._root / "one.safetensors")
            entry_of(self._root / "one.safetensors")

    def _clear(self) -> None:
        dist.barrier()
        if self._world.first:
            shutil.rmtree(self._directory)

    def _timed(self, action: Callable[[], Any], *, everyone: bool = True) -> float:
        """Seconds of what all ranks do together, or the first alone."""
        dist.barrier()
        begin = time.perf_counter()
        if everyone or self._world.first:
            action()
        dist.barrier()
        return time.perf_counter() - begin


def put(path: Path, data: memoryview) -> None:
    path.write_bytes(data)


def take(directory: Path) -> None:
    """Check a whole version and copy each of its tensors, as an engine does."""
    for name in verify(directory).files:
        with safe_open(directory / name, "pt") as file:
            for key in file.keys():
                file.get_tensor(key).clone()


def open_policy(shape: str, device: torch.device) -> tuple[PolicyModel, World]:
    """A dense decoder of random weights over the ranks that torchrun has started."""
    config = RunConfig()
    config.model.shape = {"model_type": "qwen3", **SHAPES[shape], "tie_word_embeddings": True}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = World(rank, ranks, device, Mesh.of(device.type, choose_degrees(config, ranks)), dist.group.WORLD)
    policy = build_policy(config, world)
    initialise(policy, seed=0)
    return policy, world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.1], help="elements that an update changes")
    parser.add_argument("--repeats", type=int, default=3, help="updates of each share; figures are medians")
    parser.add_argument("--directory", help="where versions are written; the system's folder by default")
    options = parser.parse_args()
    with join() as device, tempfile.TemporaryDirectory(dir=options.directory) as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        policy, world = open_policy(options.shape, device)
        bench, rows = Bench(Path(shared[0]), policy, world), []
        for share in options.shares:
            found = [bench.measure(share) for _ in range(options.repeats)]
            rows.append({"share": share, **{key: statistics.median(row[key] for row in found) for key in found[0]}})
        if world.first:
            gib = sum(p.numel() for p in policy.parameters()) * 2 / 2**30
            print(json.dumps({"shape": options.shape, "gib": gib, "ranks": world.size, "updates": rows}, indent=1))
        dist.barrier()


if __name__ == "__main__":
    main()
