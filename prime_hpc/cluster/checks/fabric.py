"""How fast do the nodes talk to each other? An all-reduce within the trainer's nodes, and transfers from the trainer to
every other node, as weights take them: NCCL between GPUs, gloo where there are none."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from prime_hpc.cluster.checks.finding import Finding
from prime_hpc.cluster.checks.meeting import node_name
from prime_hpc.cluster.files import read_json, write_json

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

CHECK = "fabric"
STORE_S = 60.0
REPEATS = 5
GB = 1e9
GPU_BYTES, CPU_BYTES = 2**28, 2**24
"""What is sent at a time: enough that latency does not count."""


@dataclass(frozen=True)
class Fabric:
    """Nodes of a step, numbered from 0; the last `trainers` of them are those of the trainer. A process for each GPU of
    a node, or one where it has none."""

    folder: Path
    nodes: int
    gpus: int
    trainers: int

    @property
    def per_node(self) -> int:
        return max(1, self.gpus)

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def first_trainer(self) -> int:
        """Rank of the first process of the trainer's nodes."""
        return (self.nodes - self.trainers) * self.per_node

    def receivers(self) -> dict[str, int]:
        """The first process of each node that gets something from the trainer's first; where all are the trainer's,
        that of the last one."""
        others = range(self.nodes - self.trainers) or [self.nodes - 1]
        name = "trainer to node" if self.trainers < self.nodes else "node to node"
        ranks = {f"{name} {node}": node * self.per_node for node in others}
        return {name: rank for name, rank in ranks.items() if rank != self.first_trainer}


def inspect_fabric(fabric: Fabric, node: int, floor_gb_s: float) -> Finding:
    """Run the processes of this node, the `node`-th, together with those of all others.

    The all-reduce's bandwidth is that of the bus, 2 (n-1)/n times bytes over seconds (NCCL tests), which does not
    depend on the number of GPUs.
    """
    if fabric.world == 1:
        return Finding(CHECK, True, "one GPU" if fabric.gpus else "one node")
    import torch.multiprocessing as mp

    out = fabric.folder / f"{node_name()}.fabric"
    try:
        mp.spawn(measure, (fabric, node, out), nprocs=fabric.per_node)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return Finding(CHECK, False, str(error).strip().splitlines()[-1])
    speeds = read_json(out) or {}
    words = ", ".join(f"{name} {speed:.2g} GB/s" for name, speed in speeds.items())
    slow = [name for name, speed in speeds.items() if speed < floor_gb_s]
    return Finding(CHECK, not slow, f"{words}: at least {floor_gb_s:g} are needed" if slow else words or "idle")


def measure(local: int, fabric: Fabric, node: int, out: Path) -> None:
    """One process; the first of a node writes GB/s by kind of transfer to `out`, those that it takes part in."""
    import torch
    import torch.distributed as dist

    rank = node * fabric.per_node + local
    if fabric.gpus:
        torch.cuda.set_device(local)
    store = _open_store(fabric.folder, rank, fabric.world)
    dist.init_process_group("nccl" if fabric.gpus else "gloo", store=store, rank=rank, world_size=fabric.world)
    size = GPU_BYTES if fabric.gpus else CPU_BYTES
    data = torch.zeros(size // 4, device="cuda" if fabric.gpus else "cpu")
    ranks = list(range(fabric.first_trainer, fabric.world))
    trainer, speeds = dist.new_group(ranks), {}
    if rank in ranks and len(ranks) > 1:
        seconds = _seconds(lambda: dist.all_reduce(data, group=trainer), data)
        speeds["all-reduce"] = 2 * (len(ranks) - 1) / len(ranks) * size / seconds / GB
    dist.barrier()
    for name, receiver in fabric.receivers().items():
        pair = dist.new_group([fabric.first_trainer, receiver])
        if rank in (fabric.first_trainer, receiver):
            seconds = _seconds(lambda pair=pair: dist.broadcast(data, fabric.first_trainer, pair), data)
            speeds[name] = size / seconds / GB
        dist.barrier()
    if local == 0:
        write_json(out, speeds)
    dist.destroy_process_group()


def _seconds(transfer: Callable[[], object], data: "torch.Tensor") -> float:
    """Of one transfer, after one that opens the connections."""
    import torch

    transfer()
    if data.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        transfer()
    if data.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / REPEATS


def _open_store(folder: Path, rank: int, world: int) -> "dist.Store":
    """A store of rank 0 on a free port, whose address the others read in `folder`."""
    import torch.distributed as dist

    address = folder / "fabric.json"
    if rank == 0:
        listener = socket.create_server(("", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(socket.gethostname(), port, world, is_master=True, wait_for_workers=False,
                              timeout=timedelta(seconds=STORE_S), master_listen_fd=listener.detach())  # fmt: skip
        write_json(address, {"host": socket.gethostname(), "port": port})
        return store
    deadline = time.monotonic() + STORE_S
    while (found := read_json(address)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first node has not opened its store within {STORE_S:.0f} s")
        time.sleep(0.2)
    return dist.TCPStore(found["host"], found["port"], world, is_master=False, timeout=timedelta(seconds=STORE_S))
