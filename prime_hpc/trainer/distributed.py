"""The trainer's ranks as one world: process group, device, threads, and small collectives."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from prime_hpc.cluster.role import Role
from prime_hpc.config.trainer import TrainerConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models.degrees import choose_degrees
from prime_hpc.trainer.parallel.mesh import Mesh


@dataclass(frozen=True)
class World:
    """All ranks. `background` is a group of its own for the thread that writes checkpoints, since two threads must not
    interleave collectives in one group."""

    rank: int
    size: int
    device: torch.device
    mesh: Mesh
    background: dist.ProcessGroup

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Ranks that see different rows."""
        return self.mesh.degrees.dp

    @property
    def dp_rank(self) -> int:
        """Whose rows this rank sees; neighbouring ranks share them."""
        return self.rank // self.row_ranks

    @property
    def row_ranks(self) -> int:
        """Ranks that see the same rows."""
        return self.size // self.dp_size


def join(role: Role) -> World:
    """Meet the other ranks through a store of rank 0 whose address goes over the rendezvous."""
    config, rank, size = role.config.trainer, role.process.index, len(role.plan.of("trainer"))
    device = _choose_device(config)
    torch.set_num_threads(config.threads or _fair_threads(role))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.collective_timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=_open_store(role, rank, size), rank=rank, world_size=size, timeout=timeout)
    mesh = Mesh.of(device.type, choose_degrees(role.config, size))
    return World(rank, size, device, mesh, dist.new_group(backend="gloo", timeout=timeout))


def leave() -> None:
    """Take the process group down once every rank has come this far."""
    dist.barrier()
    dist.destroy_process_group()


def gather(value: Any) -> list[Any]:
    """`value` (plain data) of every rank, in order of rank. Travels as msgpack, NaN included."""
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(data, (0, longest - len(data)))
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, padded)
    return [msgspec.msgpack.decode(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, sizes, strict=True)]


def _choose_device(config: TrainerConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigurationError([ConfigProblem("trainer.device", "cuda", "a GPU that torch can use on this node")])
    return torch.device("cuda:0" if available and config.device != "cpu" else "cpu")


def _fair_threads(role: Role) -> int:
    ranks_here = sum(p.node == role.process.node for p in role.plan.of("trainer"))
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def _open_store(role: Role, rank: int, size: int) -> dist.TCPStore:
    """Rank 0 listens on a free port and says where; the others wait for that and connect."""
    timeout_s = role.config.cluster.start_timeout_s
    if rank > 0:
        host, port = role.rendezvous.wait("trainer-0", "store", timeout_s).rsplit(":", 1)
        return dist.TCPStore(host, int(port), size, is_master=False, timeout=timedelta(seconds=timeout_s))
    store, address = listen(role, timeout_s, size)
    role.rendezvous.publish("starting", store=address)
    return store


def listen(role: Role, timeout_s: float, size: int | None = None) -> tuple[dist.TCPStore, str]:
    """A store of this process on a free port, and its address."""
    listener = socket.create_server((role.bind_host, 0))
    host, port = role.advertised_host, listener.getsockname()[1]
    store = dist.TCPStore(host, port, size, is_master=True, wait_for_workers=False,
                          timeout=timedelta(seconds=timeout_s), master_listen_fd=listener.detach())  # fmt: skip
    return store, f"{host}:{port}"
