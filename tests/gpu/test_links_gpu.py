"""Links over CUDA: by IPC between processes on one GPU, by NCCL between two GPUs."""

import pytest
import torch

from tests.links_support import calm, exchange, expected

pytestmark = pytest.mark.gpu


def test_buckets_arrive_by_ipc_on_one_gpu() -> None:
    assert exchange("ipc", ["cuda:0"] * 3, calm) == ({1: expected(), 2: expected()}, None)


def test_buckets_arrive_by_nccl_between_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert exchange("nccl", ["cuda:1", "cuda:0"], calm) == ({1: expected()}, None)
