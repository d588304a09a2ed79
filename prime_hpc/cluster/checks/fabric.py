"""How fast do the GPUs of all nodes talk to each other? An all-reduce over all, and a transfer from node to node."""

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prime_hpc.cluster.checks.finding import Finding
from prime_hpc.cluster.files import read_json, write_json

if TYPE_CHECKING:
    import torch

CHECK = "fabric"
STORE_S = 60.0
REPEATS = 5
GB = 1e9


def inspect_fabric(folder: Path, node: int, nodes: int, gpus: int, floor_gb_s: float) -> Finding:
    """Run one process a GPU on every node at once; `node` counts this one from 0.

    The all-reduce's bandwidth is that of the bus, 2 (n-1)/n times bytes over seconds (NCCL tests), which does not
    depend on the number of GPUs.
    """
    if gpus == 0:
        return Finding(CHECK, True, "no GPU")
    if nodes * gpus == 1:
        return Finding(CHECK, True, "one GPU")
    import torch.multiprocessing as mp

    out = folder / f"{socket.gethostname()}.fabric"
    try:
        mp.spawn(measure, (folder, node, nodes, gpus, "cuda", 2**28, out), nprocs=gpus)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return Finding(CHECK, False, str(error).strip().splitlines()[-1])
    speeds = read_json(out) or {}
    words = ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in speeds.items())
    fit = min(speeds.values()) >= floor_gb_s
    return Finding(CHECK, fit, words if fit else f"{words}: at least {floor_gb_s:g} are needed")


def measure(
    local: int, folder: Path, node: int, nodes: int, local_size: int, device: str, size: int, out: Path
) -> None:
    """One rank; the first of a node writes bytes a second by kind of transfer to `out`."""
    import torch
    import torch.distributed as dist

    rank, world = node * local_size + local, nodes * local_size
    if device == "cuda":
        torch.cuda.set_device(local)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=_open_store(folder, rank, world), rank=rank, world_size=world)
    data = torch.zeros(size // 4, device=device)
    speeds = {"all-reduce": 2 * (world - 1) / world * size / _seconds(lambda: dist.all_reduce(data), data) / GB}
    if nodes > 1:
        last = world - local_size
        speeds["node to node"] = size / _seconds(lambda: _hand_over(data, rank, last), data) / GB
    dist.barrier()
    if local == 0:
        write_json(out, speeds)
    dist.destroy_process_group()


def _hand_over(data: "torch.Tensor", rank: int, last: int) -> None:
    """From the first rank to the first of the last node; the others only wait for them."""
    import torch.distributed as dist

    if rank == 0:
        dist.send(data, last)
    elif rank == last:
        dist.recv(data, 0)
    dist.barrier()


def _seconds(transfer, data: "torch.Tensor") -> float:
    """Of one transfer, after one that opens the connections."""
    import torch

    transfer()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        transfer()
    if data.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / REPEATS


def _open_store(folder: Path, rank: int, world: int):
    """A store of rank 0 on a free port, whose address the others read in `folder`."""
    from datetime import timedelta

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
    while (found := read_json(address)) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    return dist.TCPStore(found["host"], found["port"], world, is_master=False, timeout=timedelta(seconds=STORE_S))
