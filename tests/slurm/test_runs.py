"""Whole runs on the fake engine as real Slurm jobs: they complete, under every launcher, and processes may die."""

import os
import signal
from pathlib import Path

import pytest

from tests.slurm.slurm_runs import SLOW_TOKENS, SlurmRun, assert_whole
from tools.slurm_sandbox import SlurmSandbox

pytestmark = pytest.mark.slurm

SHORT = ("max_steps=2", "trainer.ranks=1", "cluster.components.trainer.nodes=1")


def test_a_heterogeneous_job_completes_with_every_part(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "plain", "max_steps=3")
    run.until_complete()
    assert_whole(run, 3)
    states = slurm.wait(run.job.job_id, "COMPLETED")
    assert len(states) == 3
    assert len(slurm.accounted(run.job.job_id, "COMPLETED", 3)) == 3
    results = {result["process"]: result["host"] for result in run.job.results()}
    assert results == {"orchestrator-0": "node0", "env-reverse_text-0": "node0", "inference-0": "node1",
                       "inference-1": "node2", "trainer-0": "node3", "trainer-1": "node4"}  # fmt: skip
    assert set(run.startup) == {"supervisor", "processes", "orchestrator", "environment", "inference", "trainer",
                                "first batch", "first step"}  # fmt: skip
    assert max(run.startup.values()) == run.startup["first step"]
    assert min(run.startup.values()) == run.startup["supervisor"] > 0


def test_a_job_goes_on_when_its_processes_die_and_when_it_is_requeued(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    """Processes are started again inside the job, which outlives its controller, too; and requeued it goes on by
    itself. Tokens are slow, so that the steps are not over before all that."""
    run = SlurmRun(slurm, tmp_path, tiny_model, "killed", "max_steps=24", SLOW_TOKENS)
    victims = {"trainer": "trainer-1", "inference-0": "inference-0", "orchestrator": "orchestrator-0",
               "env-reverse_text-0": "env-reverse_text-0"}  # fmt: skip
    for step, (unit, process) in enumerate(victims.items(), start=4):
        run.until_step(step)
        os.kill(run.record(process)["pid"], signal.SIGKILL)
        run.until(lambda unit=unit: unit in run.recovered, f"{unit} at work again")
    slurm.restart_slurmctld()
    run.until_step(max(run.reported) + 1)
    slurm.run(["scontrol", "requeue", run.job.job_id])
    run.until_complete()
    assert_whole(run, 24)
    assert run.recovered == list(victims)
    assert run.attempts == [1, 2]
    assert set(slurm.wait(run.job.job_id, "COMPLETED").values()) == {"COMPLETED"}


def test_one_allocation_runs_the_same_plan(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "single", *SHORT, launcher="slurm_single")
    run.until_complete()
    assert_whole(run, 2)
    assert set(slurm.wait(run.job.job_id, "COMPLETED").values()) == {"COMPLETED"}


def test_linked_jobs_find_each_other(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "linked", *SHORT, launcher="slurm_linked")
    assert len(run.job.job_ids) == 2
    run.until_complete()
    assert_whole(run, 2)


@pytest.mark.slow
def test_linked_engines_follow_the_main_job_and_may_come_and_go(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "followed", "max_steps=60", launcher="slurm_linked")
    main, engines = run.job.job_ids
    run.until_step(6)
    slurm.run(["scontrol", "requeue", main])
    run.until(lambda: run.attempts == [1, 2], "the second attempt")
    run.until_step(12)
    assert run.job_ids == [main, engines], "the engines' job went on"
    slurm.run(["scontrol", "requeue", engines])
    slurm.wait(engines, "PENDING")
    run.until_complete()
    assert_whole(run, 60)
    assert run.attempts == [1, 2]


@pytest.mark.slow
def test_two_jobs_on_the_same_nodes_do_not_disturb_one_another(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    first, second = (SlurmRun(slurm, tmp_path, tiny_model, name, "max_steps=20", "cluster.cpus=1", f"seed={seed}")
                     for seed, name in enumerate(("one", "other")))  # fmt: skip
    for run in (first, second):
        run.until_step(3)
    hosts = [{name: run.record(name)["host"] for name in ("orchestrator-0", "inference-0", "trainer-1")}
             for run in (first, second)]  # fmt: skip
    assert hosts[0] == hosts[1]
    assert max(first.reported) < 20, "both work at the same time"
    for run in (first, second):
        run.until_complete()
        assert_whole(run, 20)
        assert run.attempts == [1] and {event["kind"] for event in run.events} == {"start", "complete"}
        assert slurm.accounted(run.job.job_id, "COMPLETED")
