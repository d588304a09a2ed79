"""A sender and receivers of buckets as processes of their own, for tests of links."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prime_hpc.errors import PrimeHPCError
from prime_hpc.transport.buckets import Layout, pack, unpack
from prime_hpc.transport.links import announce, open_link
from prime_hpc.transport.weights import TensorEntry
from tests.warm import warm_context

ENTRIES = [TensorEntry("a", "bfloat16", [300, 7]), TensorEntry("b", "float32", [5]), TensorEntry("c", "bfloat16", [])]
LAYOUT = Layout.of(ENTRIES)
STALL_S = 5.0
START_S = 240.0
BUCKETS = 5


def tensors(seed: int, layout: Layout = LAYOUT) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(entry.shape, generator=generator) for entry in layout.entries]


def receive(address: tuple[str, int], backend: str, rank: int, size: int, device: str, act: Any, answers: Any,
            layout: Layout, stall_s: float) -> None:  # fmt: skip
    """Take buckets and answer with the sums of their tensors; `act(rank, number)` runs before each."""
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=START_S))
    announce(store, "x", rank)
    link = open_link(backend, store, "x", rank, size, torch.device(device), stall_s, time.monotonic() + START_S)
    got = []
    try:
        for number in range(BUCKETS):
            act(rank, number)
            got.append({name: t.double().sum().item() for name, t in unpack(layout, link.receive(layout.nbytes))})
    except PrimeHPCError as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
    else:
        answers.put((rank, got))


def exchange(
    backend: str, devices: list[str], act: Callable[[int, int], None], layout: Layout = LAYOUT, stall_s: float = STALL_S
) -> tuple[dict[int, Any], str | None]:
    """Send buckets from the first device to the others: their answers, and the error that ended the sending."""
    context, size = warm_context(), len(devices)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S))
    answers = context.Queue()
    given = [(("127.0.0.1", store.port), backend, rank, size, devices[rank], act, answers, layout, stall_s)
             for rank in range(1, size)]  # fmt: skip
    processes = [context.Process(target=receive, args=arguments) for arguments in given]
    for process in processes:
        process.start()
    announce(store, "x", 0)
    device, failure = torch.device(devices[0]), None
    link = open_link(backend, store, "x", 0, size, device, stall_s, time.monotonic() + START_S)
    try:
        for number in range(BUCKETS):
            bucket = pack(layout, [t.to(device) for t in tensors(number, layout)], device)
            link.settle()
            link.post(bucket)
        link.settle()
    except PrimeHPCError as error:
        failure = str(error)
        link.close()
    for process in processes:
        process.join(START_S)
        process.kill()
    found = {}
    while not answers.empty():
        rank, answer = answers.get()
        found[rank] = answer
    return found, failure


def expected() -> list[dict[str, float]]:
    """What a receiver answers that got everything."""
    return [{entry.name: tensor.to(getattr(torch, entry.dtype)).double().sum().item()
             for entry, tensor in zip(ENTRIES, tensors(number), strict=True)} for number in range(BUCKETS)]  # fmt: skip


def calm(rank: int, number: int) -> None:
    """Nothing happens."""
