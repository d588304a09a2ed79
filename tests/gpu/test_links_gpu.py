"""Links over CUDA: by IPC between processes on one GPU, by NCCL between two GPUs."""

import os
import signal

import pytest
import torch

from prime_hpc.transport.buckets import Layout
from prime_hpc.transport.weights import TensorEntry
from tests.links_support import calm, exchange, expected

pytestmark = pytest.mark.gpu


def test_buckets_arrive_by_ipc_on_one_gpu() -> None:
    assert exchange("ipc", ["cuda:0"] * 3, calm) == ({1: expected(), 2: expected()}, None)


def test_buckets_arrive_by_nccl_between_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert exchange("nccl", ["cuda:1", "cuda:0"], calm) == ({1: expected()}, None)


def die(rank: int, number: int) -> None:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_receiver_killed_between_buckets_of_nccl_is_given_up() -> None:
    """Buckets are too large for NCCL to take them in before they are received."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layout = Layout.of([TensorEntry("a", "bfloat16", [2**26])])
    answers, failure = exchange("nccl", ["cuda:1", "cuda:0"], die, layout)
    assert answers == {}
    assert failure is not None and failure.startswith("a receiver of weights")
