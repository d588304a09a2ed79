"""Runs on a real Slurm: it takes the scripts, processes run where the plan says, and the job tells how it ended."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from submitit.core.utils import FailedJobError

from prime_hpc.commands import status, stop
from prime_hpc.config.schema import parse
from prime_hpc.launchers.slurm.executor import find, submit
from prime_hpc.launchers.slurm.jobs import RunJob
from prime_hpc.launchers.slurm.sbatch import write_scripts
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.run_plan import RunPlan, load
from tests.integration.runs import REPOSITORY, TINY
from tests.slurm.scripts import LAUNCHERS
from tests.slurm.slurm_runs import SlurmRun
from tools.slurm_sandbox import SlurmSandbox

pytestmark = pytest.mark.slurm

GIVEN = ("cluster.gpus_per_node=2", "cluster.gres=gpu:virtual", "cluster.cpus=2", "cluster.memory=500M",
         "cluster.time='00:10:00'", "cluster.signal_s=60", "trainer.ranks=4", "inference.replicas=2",
         "inference.gpus_per_replica=1", "env.workers=1", "env.train=[{id: words}]",
         "launcher.stop_grace_s=5")  # fmt: skip
REPORT = "import os, socket; print(socket.gethostname(), os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))"
WAIT_S = 120


@pytest.fixture(autouse=True)
def cluster(slurm: SlurmSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands of this process, and of those it starts, talk to the sandbox."""
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)


def make_plan(root: Path, launcher: str) -> RunPlan:
    """A plan whose processes only report where they run; the orchestrator's calls the run complete."""
    config = parse(OmegaConf.to_container(OmegaConf.from_dotlist([f"launcher.name={launcher}", *GIVEN])))
    plan = build_plan(config, root, Attempt(), gpus=0)
    for process in plan.processes:
        process.command = [sys.executable, "-c", REPORT]
    complete = f"; open({str(root / 'rendezvous' / 'complete')!r}, 'w').close()"
    plan.process("orchestrator-0").command[-1] += complete
    for folder in ("logs/attempt_1", "rendezvous"):
        (root / folder).mkdir(parents=True)
    return plan


def submit_plan(plan: RunPlan) -> RunJob:
    (Path(plan.run_dir) / "plan.json").write_bytes(plan.dump())
    return submit(plan)


def wait(job: RunJob) -> str:
    """The state of a job once it has ended."""
    deadline = time.monotonic() + WAIT_S
    while not job.watcher.is_done(job.job_id, mode="force"):
        assert time.monotonic() < deadline, job.get_info()
        time.sleep(0.5)
    return job.state


def reports(job: RunJob, plan: RunPlan) -> dict[str, tuple[str, str]]:
    """Node and GPUs of each process, as itself has seen them."""
    found = {}
    for process in plan.processes:
        host, _, gpus = (job.process(process.name).stdout() or "").strip("\n").partition(" ")
        found[process.name] = (host, gpus)
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_slurm_takes_the_scripts(launcher: str, slurm: SlurmSandbox, tmp_path: Path) -> None:
    for script in write_scripts(make_plan(tmp_path / "run", launcher)):
        assert "to start at" in slurm.run(["sbatch", "--test-only", str(script)]).stderr


@pytest.mark.parametrize("launcher", ["slurm_hetjob", "slurm_linked"])
def test_every_process_runs_where_the_plan_says(launcher: str, slurm: SlurmSandbox, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run", launcher)
    job = submit_plan(plan)
    assert wait(job) == "COMPLETED", (tmp_path / "run" / "logs" / f"job_{job.job_id}.log").read_text()
    assert [result["process"] for result in job.results()] == [p.name for p in plan.processes]
    seen = reports(job, plan)
    assert (seen["orchestrator-0"], seen["env-words-0"]) == (("node0", "none"), ("node0", "none"))
    assert [seen[f"inference-{i}"][1] for i in range(2)] == ["0", "1"]
    assert [seen[f"trainer-{i}"][1] for i in range(4)] == ["0", "1", "0", "1"]
    hosts = [seen[name][0] for name in ("inference-0", "inference-1", *(f"trainer-{i}" for i in range(4)))]
    assert hosts[0] == hosts[1] and hosts[2] == hosts[3] and hosts[4] == hosts[5]
    assert len({hosts[2], hosts[4]} - {"node0"}) == 2
    for each in job.job_ids:  # the engines' job of a linked run may end after the main one
        assert slurm.wait(each, "COMPLETED")


def test_components_share_the_nodes_of_one_allocation(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run", "slurm_single")
    job = submit_plan(plan)
    assert wait(job) == "COMPLETED", (tmp_path / "run" / "logs" / f"job_{job.job_id}.log").read_text()
    seen = reports(job, plan)
    assert seen["orchestrator-0"] == (seen["inference-0"][0], "")
    assert len({host for host, _ in seen.values()}) == plan.nodes == 3
    assert [seen[f"trainer-{i}"][1] for i in range(4)] == ["0", "1", "0", "1"]


def test_the_first_failure_ends_the_job_and_is_told(slurm: SlurmSandbox, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run", "slurm_hetjob")
    for process in plan.processes:
        process.command[-1] = "import time; time.sleep(600)"
    plan.process("trainer-2").command[-1] = "raise SystemExit('no such batch')"
    job = submit_plan(plan)
    assert wait(job) == "FAILED"
    with pytest.raises(FailedJobError, match="InfrastructureFailure: trainer-2 ended with exit code 1 on node"):
        job.results()
    assert job.process("trainer-2").stdout() == "no such batch\n"
    assert set(slurm.states(job.job_id).values()) == {"FAILED"}


def test_a_cancelled_run_ends(slurm: SlurmSandbox, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run", "slurm_linked")
    for process in plan.processes:
        process.command[-1] = "import time; time.sleep(600)"
    job = submit_plan(plan)
    while not all(list((tmp_path / "run" / "logs" / "attempt_1").glob(f"{p.name}.log")) for p in plan.processes):
        time.sleep(0.2)
    job.cancel()
    assert wait(job) == "CANCELLED"
    for job_id in job.job_ids:
        assert set(slurm.wait(job_id, "CANCELLED").values()) == {"CANCELLED"}


def test_a_script_of_ones_own_runs_the_launcher_in_its_allocation(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    arguments = ["+experiment=reverse_text_cpu", *TINY, f"model.path={tiny_model}", "run.name=mine", "max_steps=1",
                 f"run.output_dir={tmp_path}", "launcher=slurm_single", "cluster.gpus_per_node=0", "cluster.cpus=4",
                 "launcher.submit=false", "resume=auto"]  # fmt: skip
    script = tmp_path / "own.sbatch"
    command = shlex.join([sys.executable, "-m", "prime_hpc.launch", *arguments])
    header = ["#!/bin/bash", "#SBATCH --nodes=1 --ntasks-per-node=1 --cpus-per-task=4", "#SBATCH --output=own.log"]
    script.write_text("\n".join([*header, f"cd {REPOSITORY}", f"exec {command}", ""]))
    job = slurm.submit(f"--chdir={tmp_path}", str(script))
    states = slurm.wait(job, "COMPLETED", "FAILED", timeout_s=300)
    assert states == {job: "COMPLETED"}, (tmp_path / "own.log").read_text()
    submitted = find(load(tmp_path / "mine" / "plan.json"))
    assert submitted is not None and len(submitted.results()) == 4
    assert (tmp_path / "mine" / "summary.json").exists()
    assert not list(Path(os.environ["PRIME_HPC_HOME"]).glob("secrets/*"))


def test_a_run_whose_job_waits_is_not_submitted_again_and_can_be_stopped(slurm: SlurmSandbox, tmp_path: Path,
        tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    given = ("cluster.directives={begin: now+1hour}",)
    run = SlurmRun(slurm, tmp_path, tiny_model, "patient", *given, launcher="slurm_single")
    before = {path: path.read_bytes() for path in (run.root / "plan.json", run.root / "job.json")}
    job = run.job.job_ids[0]
    said = f"job {job} of this run is pending: wait for it, or end it by python -m prime_hpc.stop {run.root}"
    command = [sys.executable, "-m", "prime_hpc.resume", str(run.root)]
    again = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert (again.returncode, again.stderr) == (1, f"InfrastructureFailure: {said}\n")
    assert {path: path.read_bytes() for path in before} == before
    assert status.main([str(run.root)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\njob {job} is pending: BeginTime\n")
    assert stop.main([str(run.root)]) == 0
    assert capsys.readouterr().out == f"cancelled job {job}, which had not begun\n"
    assert slurm.states(job) in ({}, {job: "CANCELLED"})
    assert status.main([str(run.root)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\njob {job} is cancelled\n")
