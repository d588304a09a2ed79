"""Runs on the fake engine, submitted as a user submits them, and what they promise whatever happens to them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from prime_hpc.cluster.faults import VARIABLE, Fault
from prime_hpc.launchers.slurm.executor import find
from prime_hpc.observe.run_facts import read_run
from prime_hpc.observe.status import take_status
from prime_hpc.plan.run_plan import load
from tests.integration.runs import REPOSITORY, RunDirectory
from tools.endurance import account
from tools.slurm_sandbox import SlurmSandbox

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
                 launcher: str = "slurm_hetjob", faults: Sequence[Fault] = ()):  # fmt: skip
        super().__init__(output / name)
        self.sandbox = sandbox
        self.launched = subprocess.run(
            [sys.executable, "-m", "prime_hpc.launch", "+experiment=reverse_text_cpu", f"launcher={launcher}", *TINY,
             *(NODES if launcher != "slurm_single" else ()), f"model.path={model}", f"run.output_dir={output}",
             f"run.name={name}", *overrides],
            cwd=REPOSITORY, text=True, capture_output=True,
            env={**os.environ, **sandbox.env, VARIABLE: msgspec.json.encode(faults).decode()})  # fmt: skip
        assert self.launched.returncode == 0, self.launched.stdout + self.launched.stderr
        self.job = find(load(self.root / "plan.json"))

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 600) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come; the job said\n{self.output[-4000:]}"
            time.sleep(0.5)

    def until_step(self, step: int) -> None:
        self.until(lambda: max(self.reported, default=0) >= step, f"step {step}")

    def until_complete(self, timeout_s: float = 1200) -> None:
        self.until(lambda: not self.sandbox.jobs(), "the end", timeout_s)
        assert (self.root / "rendezvous" / "complete").exists(), self.output[-4000:]

    @property
    def attempts(self) -> list[int]:
        return sorted({event["attempt"] for event in self.events})

    @property
    def recovered(self) -> list[str]:
        """Units that came back to work, in order."""
        return [event["unit"] for event in self.events if event["kind"] == "recovered"]

    @property
    def job_ids(self) -> list[str]:
        """Ids of the jobs that the run's directory names now."""
        return json.loads((self.root / "job.json").read_text())["job_ids"]

    @property
    def startup(self) -> dict[str, float]:
        """Seconds from the start of the job to each milestone, as `status` has them."""
        return take_status(read_run(self.root)).startup_s

    @property
    def batch(self) -> psutil.Process:
        """The batch script's process."""
        command = ["prime_hpc.launchers.slurm.batch", str(self.root / "plan.json")]
        [found] = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-2:] == command]
        return found

    @property
    def output(self) -> str:
        """What the batch script's process said, over all starts of the job."""
        return "".join(path.read_text() for path in sorted((self.root / "logs").glob("job_*.log")))


def lives(process: psutil.Process) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_whole(run: SlurmRun, steps: int) -> None:
    """Every step was reported, no batch was cut twice, so that no step is trained on different data, every group has a
    fate, and nobody is left. Batches before the oldest checkpoint that is kept are known to the journal as a sum only.
    """
    wanted = list(range(1, steps + 1))
    assert sorted(set(run.reported)) == wanted
    assert run.cut and run.cut == wanted[-len(run.cut) :]
    assert account(run.root, steps).lost == 0
    assert not run.survivors()
