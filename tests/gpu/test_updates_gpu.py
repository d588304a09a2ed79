"""Updates of real engines over two GPUs: one that spans both, and one that dies in the middle of an NCCL stream."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from prime_hpc.orchestrator.fleet import Fleet, UpdateTimes
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import read_manifest
from tools.bench_weights import VLLM, make_model
from tools.weights_rig import Rig, rig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
ENGINE: dict[str, Any] = {**VLLM, "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**30}
TRAINER = {"dtype": "bfloat16"}
SHARED_BY_NCCL = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
"""Whether NCCL may connect two processes on one GPU, which it can from 2.30 on."""


@pytest.mark.parametrize("transport", ["filesystem", "nccl"])
@pytest.mark.parametrize("division", ["tensor_parallel_size", "data_parallel_size"])
def test_an_engine_over_two_gpus_takes_versions_and_scores_as_the_trainer(
    division: str, transport: str, tmp_path: Path
) -> None:
    """Every rank of the engine acknowledges every version, and the canary passes."""
    shared = transport != "nccl" or SHARED_BY_NCCL
    if not shared and torch.cuda.device_count() < 3:
        pytest.skip("needs three GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
    gpus = ([0, 1], [0]) if shared else ([1, 2], [0])

    async def follow(made: Rig) -> list[UpdateTimes]:
        fleet = made.connect()
        times = [await made.update(fleet, made.train(share=0.1)) for _ in range(3)]
        assert [engine.name for engine in fleet.engines if engine.serving] == ["inference-0"]
        await fleet.close()
        return times

    with rig(tmp_path / "run", make_model(tmp_path / "model", "tiny"), replicas=1, gpus=gpus, random=True,
             inference={"vllm": {**ENGINE, division: 2}}, trainer=TRAINER, transport=transport, canary_every=1,
             canary_bound=0.2) as made:  # fmt: skip
        times = asyncio.run(follow(made))
        acks = sorted(path.name for path in made.paths.acks.glob("*.json"))
    assert acks == ["inference-0.rank0.json", "inference-0.rank1.json"]
    assert all(one.canary is not None and one.canary < 0.2 for one in times)


def test_a_kill_in_the_middle_of_an_nccl_stream_ends_the_stream_and_nothing_else(tmp_path: Path) -> None:
    """The trainer gives the engine up and writes the version whole; the next engine starts from it."""

    def kill(point: str) -> None:
        if point == "update.during" and made.step == 2:
            engine = psutil.Process(made.engines.processes["inference-0"].pid)
            for process in (*engine.children(recursive=True), engine):
                process.kill()

    async def stream(fleet: Fleet) -> None:
        await made.update(fleet, PolicyVersion(0, 0))
        for _ in range(2):
            await made.update(fleet, made.train(share=0.1))

    async def begin_anew(fleet: Fleet) -> None:
        await made.update(fleet, made.train(share=0.1))
        assert [engine.name for engine in fleet.engines if engine.serving] == ["inference-0"]
        await fleet.close()

    with rig(tmp_path / "run", make_model(tmp_path / "model", "0.6b"), replicas=1, gpus=([1], [0]), random=True,
             inference={"vllm": ENGINE}, trainer=TRAINER, transport="nccl", bucket_mib=64, stall_s=10,
             timeout_s=60, full_every=50) as made:  # fmt: skip
        made.roles["trainer-0"].reach = kill
        with suppress(TimeoutError):
            asyncio.run(stream(made.connect()))
        assert read_manifest(made.paths.weights_version("0.2")).whole
        made.engines.processes["inference-0"].wait()
        made.engines.start("inference-0")
        asyncio.run(begin_anew(made.connect()))
