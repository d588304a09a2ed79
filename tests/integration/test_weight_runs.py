"""Whole runs on the fake engine whose weights travel otherwise than by whole files."""

import os
import signal
from pathlib import Path

import pytest

from prime_hpc.cluster.faults import Fault
from prime_hpc.transport.weights import published_versions, read_manifest
from tests.integration.runs import ForkedRun

STEPS = 8


@pytest.mark.parametrize("transport", ["nccl", pytest.param("delta", marks=pytest.mark.slow)])
def test_a_run_goes_on_when_an_engine_dies_in_an_update(tmp_path: Path, tiny_model: Path, transport: str) -> None:
    faults = [Fault(process="inference-1", point="update.during", action="SIGKILL", count=3)]
    run = ForkedRun(tmp_path, tiny_model, transport, f"max_steps={STEPS}", f"update.transport={transport}",
                   "update.stall_s=5", "update.keep_versions=20", "update.full_every=50", "inference.replicas=2",
                   "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.003}",
                   "recovery.backoff_s=0.2", faults=faults)  # fmt: skip
    code, text = run.wait()
    assert code == 0, text
    assert run.reported == list(range(1, STEPS + 1))
    assert f"; weights by {transport}" in " ".join(text.split())
    assert [event["kind"] for event in run.events if event["unit"] == "inference-1"][:3] == [
        "exit", "restart", "recovered",
    ]  # fmt: skip
    manifests = [read_manifest(run.root / "weights" / f"v{v}") for v in published_versions(run.root / "weights")]
    assert [m.version for m in manifests] == [f"0.{step}" for step in range(STEPS + 1)]
    assert manifests[0].whole and not all(m.whole for m in manifests)
    assert all(m.streamed or m.whole for m in manifests) if transport == "nccl" else all(m.delta for m in manifests[1:])


@pytest.mark.parametrize(("transport", "ranks"), [("zmq", 2), ("files", 1)])
def test_the_trainer_writes_what_was_streamed_when_its_only_holder_dies(
    tmp_path: Path, tiny_model: Path, transport: str, ranks: int
) -> None:
    """The engine dies while it samples the next batch, without which the trainer publishes nothing more."""
    faults = [Fault(process="inference-0", point="sampling.during", action="SIGKILL", count=900)]
    run = ForkedRun(tmp_path, tiny_model, "lost", f"max_steps={STEPS}",
                   "update.transport=nccl", "update.keep_versions=20",
                   f"orchestrator.transport={transport}", f"trainer.ranks={ranks}", "orchestrator.max_staleness=0",
                   "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.003}",
                   "recovery.backoff_s=0.2", faults=faults)  # fmt: skip
    code, text = run.wait()
    assert code == 0, text
    assert run.reported == list(range(1, STEPS + 1))
    assert {event["unit"] for event in run.events if event["kind"] == "exit"} == {"inference-0"}
    versions = published_versions(run.root / "weights")
    whole = [v.step for v in versions if read_manifest(run.root / "weights" / f"v{v}").whole]
    assert whole[0] == 0 and whole[-1] == STEPS and len(whole) == 3
    assert f"inference-0 has caught up with v0.{whole[1]}" in run.log("orchestrator-0")


def test_a_run_goes_on_when_engine_and_orchestrator_die_between_two_streams(tmp_path: Path, tiny_model: Path) -> None:
    """Neither the version that is in force nor who is to serve it is known to anybody but the trainer then."""
    run = ForkedRun(tmp_path, tiny_model, "both", f"max_steps={STEPS}", "update.transport=nccl", "update.stall_s=5",
                   "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.003}",
                   "recovery.backoff_s=0.2")  # fmt: skip
    run.wait_for_step(3)
    for process in ("inference-0", "orchestrator-0"):
        os.kill(run.record(process)["pid"], signal.SIGKILL)
    code, text = run.wait()
    assert code == 0, text
    assert run.reported == list(range(1, STEPS + 1))
    assert {event["unit"] for event in run.events if event["kind"] == "exit"} == {"inference-0", "orchestrator"}
