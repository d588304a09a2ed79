"""Updates in a row under load, by every transport that runs on CPUs: what engines hold is what was trained."""

import asyncio
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.inference.parameters import checksum
from prime_hpc.orchestrator.fleet import Fleet
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import read_manifest
from tests.warm import start_warm
from tools.weights_rig import Load, Rig, rig, steps_of

TRANSPORTS = ["filesystem", "delta", "nccl"]
PROMPT = [1, 4, 5, 6, 7, 8, 9, 10, 11, 2]
FAKE = {"engine": "tests.fake_engine", "engine_args": {"skill0": 1.0, "token_s": 0.02}}
fake_rig = partial(rig, inference=FAKE, start=start_warm)


async def checksums(fleet: Fleet) -> dict[str, dict[str, str]]:
    """By engine: checksum of every tensor that it holds."""
    return {engine.name: (await fleet._checksums(engine))[0] for engine in fleet.engines}


def expected(made: Rig) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in made.tensors().items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_updates_in_a_row_under_load(tmp_path: Path, tiny_model: Path, transport: str) -> None:
    """50 versions on two engines: no request fails, tokens of a request go on in version, weights are the trainer's."""

    async def follow(made: Rig) -> Load:
        fleet = made.connect()
        await made.update(fleet, PolicyVersion(0, 0))
        with Load(fleet, made.roles["orchestrator-0"].secrets.token, PROMPT) as load:
            for _ in range(50):
                version = made.train(share=0.02)
                times = await made.update(fleet, version)
                assert times.pause_s > 0
                assert [e.name for e in fleet.engines if e.serving] == ["inference-0", "inference-1"]
        digests = await checksums(fleet)
        assert digests == dict.fromkeys(("inference-0", "inference-1"), expected(made))
        await fleet.close()
        return load

    with fake_rig(tmp_path / "run", tiny_model, transport=transport, full_every=20) as made:
        load = asyncio.run(follow(made))
        manifests = [read_manifest(path) for path in made.paths.weights.glob("v*")]
    assert load.failed == []
    assert any(len(stamp["spans"]) > 1 for stamp in load.finished), "no request lived through an update"
    assert all(a < b for stamp in load.finished for a, b in pairwise(steps_of(stamp)))
    by_file = {m.version for m in manifests if m.whole}
    assert by_file == {"filesystem": {m.version for m in manifests}, "delta": {"0.40"}, "nccl": set()}[transport]


@pytest.mark.parametrize("transport", ["delta", "nccl"])
def test_an_engine_that_comes_late_serves_the_current_version_only(
    tmp_path: Path, tiny_model: Path, transport: str
) -> None:
    """It is killed between updates; started again it catches up by files, or takes part in the next stream."""

    async def follow(made: Rig) -> None:
        fleet = made.connect()
        watching = asyncio.create_task(fleet.watch())
        for _ in range(3):
            await made.update(fleet, made.train())
        made.engines.processes["inference-1"].kill()
        await made.update(fleet, made.train())
        assert serving(fleet) == ["inference-0"]
        made.engines.start("inference-1")
        await asyncio.to_thread(made.roles["orchestrator-0"].rendezvous.wait, "inference-1", "base_url", 60)
        for _ in range(100):
            await asyncio.sleep(0.1)
            if len(serving(fleet)) == 2:
                break
        await made.update(fleet, made.train())
        assert serving(fleet) == ["inference-0", "inference-1"]
        assert await checksums(fleet) == dict.fromkeys(("inference-0", "inference-1"), expected(made))
        watching.cancel()

    with fake_rig(tmp_path / "run", tiny_model, transport=transport, full_every=50, stall_s=3) as made:
        asyncio.run(follow(made))


def serving(fleet: Fleet) -> list[str]:
    return sorted(e.name for e in fleet.engines if e.serving)


async def arm(fleet: Fleet, name: str, kind: str) -> None:
    engine = next(e for e in fleet.engines if e.name == name)
    reply = await fleet._http.post(f"{engine.base_url}/fake/fault", json={"kind": kind})
    assert reply.status_code == 200


def test_a_wrong_tensor_is_caught_by_the_canary_and_named(tmp_path: Path, tiny_model: Path) -> None:
    """The engine acknowledges the right bytes and holds others: it leaves the rotation and is started again."""

    async def follow(made: Rig) -> dict[str, Any]:
        fleet = made.connect()
        times = await made.update(fleet, PolicyVersion(0, 0))
        assert times.canary == pytest.approx(0, abs=1e-5)
        canary = read_manifest(made.paths.weights_version("0.0")).canary
        assert len(canary.token_ids) == 63, "a scoring engine has room for one more token within seq_len = 64"
        await arm(fleet, "inference-1", "wrong_tensor")
        await made.update(fleet, made.train())
        assert serving(fleet) == ["inference-0"]
        from prime_hpc.cluster import control

        (request,) = control.take(made.paths.control)
        return {"unit": request.unit, "action": request.action, "why": request.why}

    with fake_rig(tmp_path / "run", tiny_model, canary_every=1, canary_bound=0.05) as made:
        asked = asyncio.run(follow(made))
    assert (asked["action"], asked["unit"]) == ("restart", "inference-1")
    assert "inference-1 scores the canary of v0.1" in asked["why"]
    assert "wrong in 1 parameters, first model.layers.0.mlp.up_proj.weight" in asked["why"]
