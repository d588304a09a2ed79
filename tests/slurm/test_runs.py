"""Whole runs on the fake engine as real Slurm jobs: they complete, and go on after what Slurm and chance do to them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from prime_hpc.launchers.slurm.executor import find
from prime_hpc.plan.run_plan import load
from tests.integration.runs import REPOSITORY, RunDirectory
from tools.slurm_sandbox import SlurmSandbox

pytestmark = pytest.mark.slurm

TINY = (
    "seq_len=64", "orchestrator.batch_size=16", "orchestrator.group_size=4", "trainer.ranks=2", "env.workers=1",
    "inference.engine=tests.fake_engine", "inference.replicas=2", "trainer.threads=1", "launcher.stop_grace_s=3",
    "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.01}", "checkpoint.every=3",
    "recovery.backoff_s=0.2", "cluster.lease_s=10", "cluster.gpus_per_node=0", "cluster.time='00:20:00'",
)  # fmt: skip
SLOW_TOKENS = "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.1}"
NODES = ("cluster.components.trainer.nodes=2", "cluster.components.inference.nodes=2")


class SlurmRun(RunDirectory):
    """A run that was submitted by the launch command."""

    def __init__(self, sandbox: SlurmSandbox, output: Path, model: Path, name: str, *overrides: str,
                 launcher: str = "slurm_hetjob"):  # fmt: skip
        super().__init__(output / name)
        self.sandbox = sandbox
        self.launched = subprocess.run(
            [sys.executable, "-m", "prime_hpc.launch", "+experiment=reverse_text_cpu", f"launcher={launcher}", *TINY,
             *(NODES if launcher != "slurm_single" else ()), f"model.path={model}", f"run.output_dir={output}",
             f"run.name={name}", *overrides],
            cwd=REPOSITORY, env={**os.environ, **sandbox.env}, text=True, capture_output=True)  # fmt: skip
        assert self.launched.returncode == 0, self.launched.stdout + self.launched.stderr
        self.job = find(load(self.root / "plan.json"))

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come; the job said\n{self.output[-4000:]}"
            time.sleep(0.5)

    def until_step(self, step: int) -> None:
        self.until(lambda: max(self.reported, default=0) >= step, f"step {step}")

    def until_complete(self, timeout_s: float = 300) -> None:
        self.until(lambda: (self.root / "rendezvous" / "complete").exists() and not self.sandbox.jobs(), "the end",
                   timeout_s)  # fmt: skip

    @property
    def output(self) -> str:
        """What the batch script's process said, over all starts of the job."""
        return "".join(path.read_text() for path in sorted((self.root / "logs").glob("job_*.log")))


def assert_whole(run: SlurmRun, steps: int) -> None:
    """Every step was reported, none was cut twice, so that nothing is trained on different data; nobody is left."""
    assert sorted(set(run.reported)) == list(range(1, steps + 1))
    assert run.cut == list(range(1, steps + 1))
    assert all(len(fate) == 1 for fate in run.ledger().values())
    assert not run.survivors()


def test_a_heterogeneous_job_completes_with_every_part(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "plain", "max_steps=5")
    run.until_complete()
    assert_whole(run, 5)
    states = slurm.wait(run.job.job_id, "COMPLETED")
    assert len(states) == 3
    assert set(slurm.sacct(run.job.job_id).values()) == {"COMPLETED"} and len(slurm.sacct(run.job.job_id)) == 3
    results = {result["process"]: result["host"] for result in run.job.results()}
    assert results == {"orchestrator-0": "node0", "env-reverse_text-0": "node0", "inference-0": "node1",
                       "inference-1": "node2", "trainer-0": "node3", "trainer-1": "node4"}  # fmt: skip


def test_what_dies_is_started_again_inside_the_job(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "killed", "max_steps=40")
    for step, process in ((4, "trainer-1"), (8, "inference-0"), (12, "orchestrator-0"), (16, "env-reverse_text-0")):
        run.until_step(step)
        os.kill(run.record(process)["pid"], signal.SIGKILL)
    run.until_complete()
    assert_whole(run, 40)
    assert [e["unit"] for e in run.events if e["kind"] == "recovered"] == ["trainer", "inference-0", "orchestrator",
                                                                           "env-reverse_text-0"]  # fmt: skip
    assert set(slurm.wait(run.job.job_id, "COMPLETED").values()) == {"COMPLETED"}


def test_a_requeued_job_goes_on_by_itself(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "requeued", "max_steps=30")
    run.until_step(7)
    slurm.run(["scontrol", "requeue", run.job.job_id])
    run.until_complete()
    assert_whole(run, 30)
    assert {e["attempt"] for e in run.events} == {1, 2}


@pytest.mark.slow
def test_a_run_drains_before_the_time_limit_and_goes_on_in_the_same_job(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "limited", "max_steps=24", "cluster.time='00:02:00'",
                   "cluster.signal_s=30", SLOW_TOKENS)  # fmt: skip
    run.until_complete(580)
    assert_whole(run, 24)
    assert "draining, as the supervisor asked" in run.output and "going on in this job" in run.output
    assert "TIMEOUT" not in slurm.sacct(run.job.job_id).values()


@pytest.mark.slow
def test_a_killed_supervisor_is_followed_by_a_new_attempt_after_a_requeue(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "headless", "max_steps=20", "cluster.lease_s=4")
    run.until_step(4)
    [batch] = [p for p in psutil.process_iter(["cmdline"]) if str(run.root) in " ".join(p.info["cmdline"] or [])
               and "prime_hpc.launchers.slurm.batch" in (p.info["cmdline"] or [])]  # fmt: skip
    batch.kill()
    run.until(lambda: not run.survivors(), "the end of every process", 60)
    again = SlurmRun(slurm, tmp_path, tiny_model, "headless", "max_steps=20", "cluster.lease_s=4", "resume=auto")
    again.until_complete()
    assert_whole(again, 20)


def test_one_allocation_runs_the_same_plan(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "single", "max_steps=4", launcher="slurm_single")
    run.until_complete()
    assert_whole(run, 4)
    assert set(slurm.wait(run.job.job_id, "COMPLETED").values()) == {"COMPLETED"}


def test_linked_jobs_find_each_other(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "linked", "max_steps=4", launcher="slurm_linked")
    assert len(run.job.job_ids) == 2
    run.until_complete()
    assert_whole(run, 4)
