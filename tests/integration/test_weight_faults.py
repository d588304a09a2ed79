"""What each failure does to an update: the engine it strikes is left behind, the others go on, and all come back."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import torch

from prime_hpc.cluster.faults import VARIABLE, Fault
from prime_hpc.cluster.role import RESTART_VARIABLE
from prime_hpc.orchestrator.fleet import Fleet
from prime_hpc.trainer import weights_sender
from prime_hpc.transport.weights import read_manifest
from tests.integration.test_weight_updates import FAKE, arm, checksums, expected, fake_rig, serving
from tests.integration.test_weight_updates_vllm import assert_acknowledged
from tools.weights_rig import START_S, Rig, rig

NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
BOTH = ["inference-0", "inference-1"]
PHASES = ["before", "during", "after"]


async def until(condition: Callable[[], bool], limit_s: float = 600) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def until_known(fleet: Fleet, url: str) -> None:
    """Whoever comes later than a stream takes part in the next."""
    await until(lambda: url in [engine.base_url for engine in fleet.engines])


async def assert_whole(made: Rig, fleet: Fleet) -> None:
    """One more update reaches both engines, which then hold what the trainer does."""
    await until(lambda: len(fleet.engines) == 2)
    version = made.train()
    await made.update(fleet, version)
    await until(lambda: serving(fleet) == BOTH)
    assert_acknowledged(made, version)
    found = await checksums(fleet)
    assert found["inference-0"] == found["inference-1"]
    if made.roles["trainer-0"].config.inference.engine == FAKE["engine"]:  # vLLM's tensors have names of their own
        assert found["inference-0"] == expected(made)


@pytest.mark.parametrize(
    ("transport", "engine"),
    [
        ("nccl", "fake"),
        pytest.param("filesystem", "fake", marks=pytest.mark.slow),
        pytest.param("delta", "fake", marks=pytest.mark.slow),
        pytest.param("nccl", "vllm", marks=[pytest.mark.slow, NEEDS_VLLM]),
    ],
)
def test_an_engine_killed_in_any_phase_of_an_update_comes_back(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, transport: str, engine: str
) -> None:
    faults = [Fault(process="inference-1", point=f"update.{phase}", action="SIGKILL", count=2, restart=restart)
              for restart, phase in enumerate(PHASES)]  # fmt: skip
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(faults).decode())

    async def follow(made: Rig) -> None:
        fleet = made.connect()
        watching = asyncio.create_task(fleet.watch())
        for restart, _ in enumerate(PHASES, start=1):
            process = made.engines.processes["inference-1"]
            while process.poll() is None:
                await made.update(fleet, made.train())
                assert "inference-0" in serving(fleet)
            monkeypatch.setenv(RESTART_VARIABLE, str(restart))
            made.engines.start("inference-1")
            wait = made.roles["orchestrator-0"].rendezvous.wait
            url = await asyncio.to_thread(wait, "inference-1", "base_url", START_S)
            await until_known(fleet, url)
        await assert_whole(made, fleet)
        watching.cancel()

    make = partial(fake_rig, stall_s=5) if engine == "fake" else partial(rig, stall_s=60, timeout_s=600)
    with make(tmp_path / "run", tiny_model, transport=transport, full_every=50) as made:
        asyncio.run(follow(made))


def test_bytes_that_change_on_the_way_are_never_served(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody serves it then, so that the trainer is asked to write the version, and both engines load the file."""
    pack = weights_sender.pack

    def damaged(layout, tensors, device) -> torch.Tensor:
        bucket = pack(layout, tensors, device)
        bucket[layout.spans[1][0]] ^= 1
        return bucket

    async def follow(made: Rig) -> None:
        fleet = made.connect()
        watching = asyncio.create_task(fleet.watch())
        await made.update(fleet, made.train())
        monkeypatch.setattr(weights_sender, "pack", damaged)
        await made.update(fleet, made.train())
        monkeypatch.setattr(weights_sender, "pack", pack)
        name = made.writer._sender.offer().buckets[0][1].name
        assert f"{name} changed on the way (1 of" in caplog.text
        assert read_manifest(made.paths.weights_version("0.2")).whole
        await assert_whole(made, fleet)
        watching.cancel()

    with caplog.at_level(logging.ERROR), fake_rig(tmp_path / "run", tiny_model, transport="nccl") as made:
        asyncio.run(follow(made))


@pytest.mark.parametrize("kind", ["hang_load", "out_of_memory"])
def test_an_engine_that_hangs_or_runs_out_of_memory_is_left_behind(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    async def follow(made: Rig) -> None:
        fleet = made.connect()
        await made.update(fleet, made.train())
        await made.update(fleet, made.train())
        await arm(fleet, "inference-1", kind)
        version = made.train()
        await made.update(fleet, version)
        assert serving(fleet) == ["inference-0"]
        assert (await checksums_of(fleet, "inference-0")) == expected(made)
        if kind == "out_of_memory":
            assert await asyncio.to_thread(made.engines.processes["inference-1"].wait, 30) != 0

    with fake_rig(tmp_path / "run", tiny_model, transport="nccl", stall_s=4, timeout_s=10) as made:
        asyncio.run(follow(made))


async def checksums_of(fleet: Fleet, name: str) -> dict[str, str]:
    engine = next(e for e in fleet.engines if e.name == name)
    return (await fleet._checksums(engine))[0]
