"""A worker rank's end of streamed weights, whatever the engine."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from prime_hpc.errors import CorruptData, InfrastructureFailure
from prime_hpc.transport.buckets import Layout, digest, sums_of, unpack
from prime_hpc.transport.links import Link, announce, go_key, losing, open_link, ready_key
from prime_hpc.transport.weights import Stream, read_manifest


class StreamReceiver:
    """One worker rank, counted from 0 over all of an engine's; keeps its link from one version to the next."""

    def __init__(self, process: str, rank: int, workers: int, device: torch.device):
        self._process, self._rank, self._size, self._device = process, rank + 1, workers + 1, device
        self._name: str | None = None
        self._link: Link | None = None
        self.names: list[str] = []
        """Tensors of the newest version, in the order they came."""
        self.digest = ""
        """Of the newest version, once all tensors have come."""

    def join(self, directory: Path, link: str) -> Stream:
        """Connect with the sender, unless that was done for an earlier version.

        Raises:
            CorruptData: the version is not on offer any more.
            InfrastructureFailure: the sender did not come.
        """
        stream = read_manifest(directory).stream
        if stream is None:
            raise CorruptData(f"{directory} is not on offer any more")
        address = stream.senders[self._process]
        if self._link is None or self._name != f"{address} {link}":
            self._leave()
            self._open(stream, address, link)
        self._stream, self._key = stream, link
        return stream

    def receive(self, version: str) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, each checked before it is handed out; valid for as long as it is referred to.

        Raises:
            CorruptData: a tensor changed on the way.
            InfrastructureFailure: the sender has gone.
        """
        self.names, sums = [], []
        try:
            self._wait_for_sign(version)
            for entries in self._stream.buckets:
                layout = Layout.of(entries)
                bucket = self._link.receive(layout.nbytes)
                for name, tensor in unpack(layout, bucket):
                    self.names.append(name)
                    yield name, tensor
                sums.append(sums_of(layout, bucket))
        except InfrastructureFailure:
            self._leave()
            raise
        self.digest = digest(sums)

    def _open(self, stream: Stream, address: str, link: str) -> None:
        host, port = address.rsplit(":", 1)
        with losing(f"the sender at {address}"):
            self._store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False,
                                        timeout=timedelta(seconds=stream.stall_s))  # fmt: skip
            announce(self._store, link, self._rank)
        self._link = open_link(stream.backend, self._store, link, self._rank, self._size, self._device, stream.stall_s,
                               time.monotonic() + stream.stall_s)  # fmt: skip
        self._name = f"{address} {link}"

    def _wait_for_sign(self, version: str) -> None:
        with losing("the sender of weights"):
            self._store.set(ready_key(self._key, version, self._rank), "")
            limit = timedelta(seconds=self._stream.ready_s + self._stream.stall_s)
            self._store.wait([go_key(self._key, version)], limit)

    def _leave(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._name = None
