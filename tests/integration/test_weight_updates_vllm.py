"""Updates in a row on real engines: in the end they are what an engine is that starts from the same weights."""

import asyncio
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.orchestrator.fleet import Fleet
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import read_manifest
from tools.weights_rig import Load, Rig, rig, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

PROMPT = [1, 9, 4, 17, 22, 2]
SEQUENCE = [1, 9, 4, 17, 22, 2, 5, 6, 7, 8, 30, 12]
LONG = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 50}


async def portrait(fleet: Fleet) -> list[Any]:
    """Of every engine: checksums of what lies in its memory, and its scores of a sequence."""
    return [(await fleet._checksums(engine), (await fleet._post(engine, "score", {"token_ids": SEQUENCE}))["logprobs"])
            for engine in fleet.engines]  # fmt: skip


def assert_acknowledged(made: Rig, version: PolicyVersion) -> None:
    """Every worker rank got the very tensors that the trainer announced."""
    manifest = read_manifest(made.paths.weights_version(str(version)))
    sent = (str(version), manifest.streamed or manifest.digest)
    acks = [json.loads(path.read_bytes()) for path in made.paths.acks.glob("inference-*.rank*.json")]
    assert [(ack["version"], ack["digest"]) for ack in acks] == [sent] * 2


async def follow(made: Rig, updates: int) -> tuple[Load, list[Any]]:
    fleet = made.connect()
    await made.update(fleet, PolicyVersion(0, 0))
    with Load(fleet, made.roles["orchestrator-0"].secrets.token, PROMPT, **LONG) as load:
        for _ in range(updates):
            version = made.train(share=0.02)
            times = await made.update(fleet, version)
            assert_acknowledged(made, version)
            assert times.canary is not None and times.canary < 1e-5
            assert [e.name for e in fleet.engines if e.serving] == ["inference-0", "inference-1"]
    return load, await portrait(fleet)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """The portrait of an engine that starts from a model's folder; equal weights are started once."""
    known: dict[bytes, Any] = {}

    def portrait_of(model: Path) -> Any:
        weights = b"".join(path.read_bytes() for path in sorted(model.glob("*.safetensors")))
        if weights not in known:
            with rig(tmp_path_factory.mktemp("fresh") / "run", model, replicas=1) as made:
                (known[weights],) = asyncio.run(portrait(made.connect()))
        return known[weights]

    return portrait_of


@pytest.mark.parametrize("transport", ["filesystem", "delta", "nccl"])
def test_fifty_updates_leave_what_a_fresh_engine_loads(
    tmp_path: Path, tiny_model: Path, fresh: Callable[[Path], Any], transport: str
) -> None:
    settings = {"transport": transport, "canary_every": 1, "canary_bound": 1e-5, "timeout_s": 1800, "stall_s": 300}
    with rig(tmp_path / "run", tiny_model, **settings) as made:
        load, (first, second) = asyncio.run(follow(made, 50))
        made.writer.export()
        exported = made.paths.root / "model"
    for path in tiny_model.iterdir():
        if not (exported / path.name).exists():
            shutil.copy(path, exported)
    assert first == second == fresh(exported)
    assert load.failed == []
    assert any(len(stamp["spans"]) > 1 for stamp in load.finished), "no request lived through an update"
    assert all(a < b for stamp in load.finished for a, b in pairwise(steps_of(stamp)))
