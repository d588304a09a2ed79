"""Whole runs on the fake engine in which processes die, hang or raise: the run goes on and nothing is lost."""

import os
import re
import signal
from pathlib import Path

import pytest

from prime_hpc.cluster import control
from prime_hpc.cluster.faults import Fault
from prime_hpc.orchestrator.journal import BatchCut, read
from prime_hpc.plan.run_plan import read_forks
from prime_hpc.transport.checkpoints import complete_steps
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import published_versions, verify
from tests.integration.runs import ForkedRun

EVEN = "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.003}"
QUICK = (EVEN, "checkpoint.every=3", "checkpoint.keep_last=100", "recovery.backoff_s=0.2", "recovery.hang_s=10")


def assert_whole(run: ForkedRun, steps: int) -> None:
    """Every step was reported once and every group has one fate: what a run promises whatever happened to it."""
    assert run.reported == list(range(1, steps + 1))
    assert [r.step for r, _ in read(run.root / "rollouts" / "journal") if isinstance(r, BatchCut)] == list(
        range(1, steps + 1)
    )
    assert all(len(fate) == 1 for fate in run.ledger().values())
    assert not run.survivors()


def kinds(run: ForkedRun, unit: str) -> list[str]:
    return [event["kind"] for event in run.events if event["unit"] == unit]


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> ForkedRun:
    """A run in which every role fails once: killed, suspended, or by an exception."""
    faults = [
        Fault(process="trainer-1", point="step.during", action="SIGSTOP", count=5),
        Fault(process="trainer-0", point="save.during", action="SIGKILL", restart=1),
        Fault(process="orchestrator-0", point="batch.during", action="SIGKILL", count=7),
        Fault(process="inference-0", point="update.during", action="SIGKILL", count=9),
        Fault(process="env-reverse_text-0", point="sampling.during", action="raise", count=5),
        Fault(process="env-reverse_text-0", point="sampling.after", action="SIGKILL", count=90),
    ]
    run = ForkedRun(tmp_path_factory.mktemp("outputs"), tiny_model, "survivor", "max_steps=12", "trainer.ranks=2",
                   "update.keep_versions=50", *QUICK, faults=faults)  # fmt: skip
    code, text = run.wait(400)
    assert code == 0, text
    return run


def test_a_run_outlives_the_failure_of_every_role(survivor: ForkedRun) -> None:
    assert_whole(survivor, 12)
    assert kinds(survivor, "orchestrator") == ["exit", "restart", "recovered"]
    assert kinds(survivor, "inference-0") == ["exit", "restart", "recovered"]
    assert kinds(survivor, "env-reverse_text-0") == ["exit", "restart", "recovered"]
    assert kinds(survivor, "trainer") == ["hang", "restart", "recovered", "exit", "restart", "recovered"]


def test_what_hung_is_named_with_what_it_did_and_its_stacks(survivor: ForkedRun) -> None:
    (hang,) = [event for event in survivor.events if event["kind"] == "hang"]
    assert hang["process"] == "trainer-1"
    assert re.match(r"no sign of life for 1\d s, last seen training step [45]", hang["reason"])
    assert "(most recent call first)" in survivor.log("trainer-1")


def test_steps_trained_again_give_the_same_weights_bit_for_bit(survivor: ForkedRun) -> None:
    """The trainer went back to a checkpoint and trained the same batches: weights of both lineages must be equal."""
    versions = published_versions(survivor.root / "weights")
    again = [v for v in versions if v.lineage > 0 and PolicyVersion(0, v.step) in versions]
    assert [v.step for v in again if v.lineage == 1][:2] == [3, 4]
    for version in again:
        first, second = (verify(survivor.root / "weights" / f"v{v}") for v in (PolicyVersion(0, version.step), version))
        assert first.digest == second.digest, f"v{second.version} differs from v{first.version}"


def test_a_fleet_goes_on_without_an_engine_past_its_budget(tmp_path: Path, tiny_model: Path) -> None:
    faults = [Fault(process="inference-1", point="sampling.before", action="SIGKILL", count=9, restart=n)
              for n in (0, 1)]  # fmt: skip
    run = ForkedRun(tmp_path, tiny_model, "degraded", "max_steps=8", "inference.replicas=2",
                   "recovery.inference.max_restarts=1", *QUICK, faults=faults)  # fmt: skip
    code, text = run.wait()
    assert code == 0, text
    assert_whole(run, 8)
    assert kinds(run, "inference-1") == ["exit", "restart", "recovered", "exit", "degrade"]
    assert "going on without inference-1" in text


def test_a_unit_past_its_budget_that_nobody_can_stand_in_for_ends_the_run(tmp_path: Path, tiny_model: Path) -> None:
    faults = [Fault(process="orchestrator-0", point="batch.before", action="raise")]
    run = ForkedRun(tmp_path, tiny_model, "ended", "max_steps=8", "recovery.orchestrator.max_restarts=0", *QUICK,
                   faults=faults)  # fmt: skip
    code, text = run.wait()
    assert code == 1
    assert "orchestrator-0 failed first (exit code 1)" in text and "a fault that was asked for at batch.before" in text
    assert not run.survivors()


def test_a_drained_run_saves_and_goes_on_with_the_batches_it_had(tmp_path: Path, tiny_model: Path) -> None:
    run = ForkedRun(tmp_path, tiny_model, "drained", "max_steps=200", *QUICK)
    run.wait_for_step(4)
    control.ask(run.root / "rendezvous" / "control", "drain", "maintenance", by="tester")
    code, text = run.wait()
    assert code == 0 and "draining, as tester asked: maintenance" in text and "drained: saved and left" in text
    steps = run.summary["steps"]
    assert run.record("trainer-0")["checkpoint"].endswith(f"step_{steps}")
    again = ForkedRun(tmp_path, tiny_model, "drained", f"max_steps={steps + 3}", "resume=latest", *QUICK)
    code, text = again.wait()
    assert code == 0, text
    assert_whole(again, steps + 3)
    assert published_versions(again.root / "weights")[-1].lineage == 0, "nothing was abandoned"


def test_a_new_run_forks_from_a_checkpoint_of_another(survivor: ForkedRun, tiny_model: Path) -> None:
    run = ForkedRun(survivor.root.parent, tiny_model, "fork", "max_steps=15", "trainer.ranks=1",
                   f"resume={survivor.root}/checkpoints/step_12", *QUICK)  # fmt: skip
    code, text = run.wait()
    assert code == 0, text
    assert run.reported == run.cut == [13, 14, 15], "on one rank instead of two"
    assert run.summary["steps"] == 15 and survivor.summary["steps"] == 12


def test_a_trainer_that_passes_over_damaged_checkpoints_gets_the_batches_of_that_time(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = ForkedRun(tmp_path, tiny_model, "damaged", "max_steps=16", "update.keep_versions=50", *QUICK)
    run.wait_for_step(10)
    oldest, *newer = complete_steps(run.root / "checkpoints")
    for step in newer:
        next((run.root / "checkpoints" / f"step_{step}").glob("*.distcp")).write_bytes(b"damaged")
    os.kill(run.record("trainer-0")["pid"], signal.SIGKILL)
    code, text = run.wait()
    assert code == 0, text
    assert read_forks(run.root / "forks.json")[0].step == oldest
    assert_whole(run, 16)
    assert kinds(run, "orchestrator") == [], "it took the batches from its journal without a restart"


def test_a_source_past_its_error_budget_has_the_run_save_and_leave(tmp_path: Path, tiny_model: Path) -> None:
    """Of three tasks in turn the first ends well, and two have graders that fail: 12 of 20 episodes."""
    zoo = "env.train=[{id: tests.integration.zoo, order: {name: sequential}, num_tasks: 3, sampling: {max_tokens: 8}}]"
    run = ForkedRun(tmp_path, tiny_model, "paused", "max_steps=50", "seq_len=256", zoo, "pause.max_s=3",
                   "orchestrator.drop_zero_advantage=false", EVEN)  # fmt: skip
    code, text = run.wait()
    assert code == 1
    assert re.search(r"EnvironmentFailure: \d+% of the last \d+ episodes of zoo failed, .*a pause of \d+ s", text)
    assert re.search(r"paused, since \d+% of the last \d+ episodes of zoo failed, .*; the last one: \w+: ", text)
    steps = run.summary["steps"]
    assert steps >= 1 and run.record("trainer-0")["checkpoint"].endswith(f"step_{steps}")
    assert run.reported == list(range(1, steps + 1)) and not run.survivors()
