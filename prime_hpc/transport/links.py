"""Links between the trainer rank that sends weights (rank 0) and the worker ranks of one engine (1, 2, ...).

A link outlives many versions. It ends with the first wait that takes too long or whose peer has gone: both sides close
it, and the next version opens another, under a new name. So an engine that dies never holds up the others for longer
than one such wait.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from prime_hpc.errors import InfrastructureFailure

POLL_S = 0.0005


class Link(Protocol):
    """One sender, some receivers."""

    def post(self, bucket: Tensor) -> None:
        """Begin to send uint8[n]; it must not be changed until it is settled."""
        ...

    def settle(self) -> None:
        """Wait until the bucket that was posted last has been taken.

        Raises:
            InfrastructureFailure: a receiver has gone or stood still; the link is of no use any more.
        """
        ...

    def receive(self, nbytes: int) -> Tensor:
        """The next bucket, uint8[nbytes] of the receiver's own.

        Raises:
            InfrastructureFailure: the sender has gone or stood still; the link is of no use any more.
        """
        ...

    def close(self) -> None:
        """Stop what is under way."""
        ...


def announce(store: dist.Store, name: str, rank: int) -> None:
    """Tell the other ends of link `name` that this one is there."""
    store.set(f"{name}.here.{rank}", "")


def open_link(
    backend: str, store: dist.Store, name: str, rank: int, size: int, device: torch.device, stall_s: float,
    deadline: float,
) -> Link:  # fmt: skip
    """Connect with the other ends of link `name`, once all have announced themselves in `store`.

    Raises:
        InfrastructureFailure: one of them did not come by `deadline` (monotonic seconds).
    """
    peers = [f"{name}.here.{peer}" for peer in range(size)]
    with losing(f"the other ends of link {name}"):
        wait_until(lambda: store.check(peers), f"an end of link {name}", deadline)
        kept = dist.PrefixStore(name, store)
        if backend == "ipc":
            return IpcLink(kept, rank, size, device, stall_s)
        return CollectiveLink(backend, kept, rank, size, device, stall_s)


class CollectiveLink:
    """Broadcasts of a process group of its own, by NCCL between GPUs and by gloo between CPUs."""

    def __init__(self, backend: str, store: dist.Store, rank: int, size: int, device: torch.device, stall_s: float):
        self._group = _open_nccl(store, rank, size) if backend == "nccl" else _open_gloo(store, rank, size, stall_s)
        self._device, self._stall_s = device, stall_s
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._work: dist.Work | None = None

    def post(self, bucket: Tensor) -> None:
        with losing("a receiver of weights"):
            self._work = self._group.broadcast([bucket], self._options)

    def settle(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            self._finish(work, "a receiver of weights")

    def receive(self, nbytes: int) -> Tensor:
        bucket = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with losing("the sender of weights"):
            work = self._group.broadcast([bucket], self._options)
        self._finish(work, "the sender of weights")
        return bucket

    def close(self) -> None:
        self._group.abort()

    def _finish(self, work: dist.Work, peer: str) -> None:
        """Wait on the host, as only there is a deadline."""
        wait_until(work.is_completed, peer, time.monotonic() + self._stall_s)
        with losing(peer):
            work.wait()


class IpcLink:
    """One buffer of GPU memory that the sender fills and the receivers, processes on the same GPU, copy from."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, stall_s: float):
        self._store, self._rank, self._device = store, rank, device
        self._receivers = range(1, size)
        self._stall = timedelta(seconds=stall_s)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._count = 0
        self._posted = False

    def post(self, bucket: Tensor) -> None:
        self._count += 1
        handle = "" if len(bucket) <= len(self._buffer) else self._export(len(bucket))
        self._buffer[: len(bucket)].copy_(bucket)
        torch.cuda.synchronize(self._device)
        with losing("a receiver of weights"):
            self._store.set(f"full.{self._count}", handle)
        self._posted = True

    def settle(self) -> None:
        if not self._posted:
            return
        self._posted = False
        taken = [f"taken.{self._count}.{rank}" for rank in self._receivers]
        with losing("a receiver of weights"):
            self._store.wait(taken, self._stall)
            for key in (*taken, f"full.{self._count}"):
                self._store.delete_key(key)

    def receive(self, nbytes: int) -> Tensor:
        self._count += 1
        with losing("the sender of weights"):
            self._store.wait([f"full.{self._count}"], self._stall)
            handle = self._store.get(f"full.{self._count}")
        if handle:
            self._buffer = _import_buffer(bytes.fromhex(handle.decode()), self._device)
        bucket = self._buffer[:nbytes].clone()
        torch.cuda.synchronize(self._device)
        with losing("the sender of weights"):
            self._store.set(f"taken.{self._count}.{self._rank}", "")
        return bucket

    def close(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _export(self, nbytes: int) -> str:
        """A larger buffer, and what other processes need to map it, hex."""
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return msgspec.msgpack.encode(self._buffer.untyped_storage()._share_cuda_()[1:]).hex()


def _import_buffer(handle: bytes, device: torch.device) -> Tensor:
    """uint8[n] over the memory of another process."""
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *msgspec.msgpack.decode(handle))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _open_gloo(store: dist.Store, rank: int, size: int, stall_s: float) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=stall_s))


def _open_nccl(store: dist.Store, rank: int, size: int) -> Any:
    """A group whose failures are left to this module: by default torch would end the process."""
    with patch.dict(os.environ, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}):
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


def wait_until(condition: Callable[[], bool], peer: str, deadline: float) -> None:
    """Return once `condition` holds; a wait inside torch would keep other threads from its store.

    Raises:
        InfrastructureFailure: it did not by `deadline` (monotonic seconds); `peer` is to blame.
    """
    begin = time.monotonic()
    while not condition():
        if time.monotonic() > deadline:
            raise InfrastructureFailure(f"{peer} stood still for {time.monotonic() - begin:.0f} s; see its log")
        time.sleep(POLL_S)


@contextmanager
def losing(peer: str) -> Iterator[None]:
    """What torch raises when a peer has gone, by a type of this product."""
    try:
        yield
    except RuntimeError as error:
        raise InfrastructureFailure(f"{peer} is lost: {error}") from error


def ready_key(link: str, version: str, rank: int) -> str:
    """In the sender's store: worker `rank` has stopped sampling and waits for `version`."""
    return f"{link}.{version}.ready.{rank}"


def go_key(link: str, version: str) -> str:
    """In the sender's store: the buckets of `version` are about to come."""
    return f"{link}.{version}.go"
