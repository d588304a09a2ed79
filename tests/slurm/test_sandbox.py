"""The sandbox itself: its nodes, partitions and accounting, two at once, one without root, and what is left of it."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prime_hpc.errors import InfrastructureFailure
from tests.slurm.hetjobs import TASK, Component, HetJob
from tools.slurm_sandbox import SlurmSandbox

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
OTHER = ["--nodes", "2", "--cpus", "1", "--gpus", "0"]
CLI = [sys.executable, "-m", "tools.slurm_sandbox"]
DESCRIBE = "echo $SLURMD_NODENAME $(hostname) $(getent hosts $SLURMD_NODENAME)"


@pytest.fixture(scope="module", autouse=True)
def silenced(slurm_sandbox: SlurmSandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HetJob]:
    """A job on `node1` of a second sandbox, begun by the command line, whose slurmd was killed. Slurm takes a while to
    notice, so this comes before all tests and the last ones ask for it."""
    directory, folder = tmp_path_factory.mktemp("other") / "slurm", tmp_path_factory.mktemp("silenced")
    subprocess.run([*CLI, "up", "--dir", directory, *OTHER], cwd=ROOT, check=True)
    other = SlurmSandbox.attach(directory)
    wrap = f"--wrap=exec {sys.executable} {TASK} 0.0 end"
    job = HetJob(other, folder, other.submit(f"--chdir={folder}", "--nodelist=node1", wrap), [Component("")])
    job.wait_for_tasks()
    other.kill_slurmd("node1")
    yield job
    other.down()


def test_every_node_has_its_own_name_and_address(slurm: SlurmSandbox):
    if slurm.layout.isolation == "none":
        pytest.skip("needs the right to make UTS and mount namespaces")
    lines = slurm.run(["srun", "--nodes=5", "bash", "-c", DESCRIBE]).stdout.splitlines()
    described = [line.split() for line in lines]
    assert sorted([node, host, known] for node, host, _, known in described) == [
        [name] * 3 for name in slurm.layout.names
    ]
    addresses = {address for _, _, address, _ in described}
    assert len(addresses) == 5 and all(address.startswith("127.") for address in addresses)


def test_gpus_are_given_out_by_index_and_only_where_they_are(slurm: SlurmSandbox):
    command = ["bash", "-c", "sleep 1; echo $CUDA_VISIBLE_DEVICES"]
    tasks = ["srun", "--partition=gpu", "--nodes=1", "--ntasks=2", "--gpus-per-task=1", *command]
    assert sorted(slurm.run(tasks).stdout.split()) == ["0", "1"]
    assert slurm.run(["srun", "--partition=cpu", "--gpus-per-node=1", "true"], check=False).returncode != 0


def test_preemption_requeues_a_job_of_the_preemptible_partition(slurm: SlurmSandbox):
    low = slurm.submit("--partition=preemptible", "--nodes=5", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    slurm.wait(low, "RUNNING")
    high = slurm.submit("--partition=cpu", "--output=/dev/null", "--wrap=sleep 300")
    slurm.wait(high, "RUNNING")
    assert slurm.wait(low, "PENDING") == {low: "PENDING"}


def test_jobs_and_new_partitions_outlive_a_restart_of_the_controller(slurm: SlurmSandbox):
    slurm.add_partition("short", ["node1", "node2"], MaxTime="1")
    job = slurm.submit("--partition=short", "--nodes=2", "--output=/dev/null", "--time=1", "--wrap=sleep 300")
    slurm.wait(job, "RUNNING")
    starts = slurm.log("slurmctld").count("slurmctld version")
    slurm.restart_slurmctld()
    assert slurm.states(job) == {job: "RUNNING"}
    refused = slurm.run(["sbatch", "--test-only", "--partition=short", "--nodes=3", "--wrap=true"], check=False)
    assert refused.returncode != 0
    assert slurm.log("slurmctld").count("slurmctld version") == starts + 1


def test_tasks_outlive_a_slurmd_that_is_back_in_time(slurm: SlurmSandbox):
    job = slurm.submit("--nodelist=node3", "--output=/dev/null", "--wrap=sleep 2")
    slurm.wait(job, "RUNNING")
    slurm.kill_slurmd("node3")
    slurm.restart_slurmd("node3")
    assert slurm.wait(job, "COMPLETED") == {job: "COMPLETED"}


def test_accounting_has_an_exit_code_and_the_reason_of_the_end(slurm: SlurmSandbox):
    failed = slurm.submit("--output=/dev/null", "--wrap=exit 3")
    slurm.wait(failed, "FAILED")
    assert slurm.accounted(failed, "FAILED") == {failed: "FAILED"}
    row = slurm.run(["sacct", "-nPX", f"--jobs={failed}", "--format=ExitCode"]).stdout
    assert row == "3:0\n"


def test_a_directory_that_is_no_sandbox_is_refused(slurm: SlurmSandbox, tmp_path: Path):
    with pytest.raises(InfrastructureFailure, match="holds no sandbox"):
        SlurmSandbox.attach(tmp_path)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(InfrastructureFailure, match="is not empty"):
        SlurmSandbox(tmp_path).up()
    with pytest.raises(InfrastructureFailure, match="a sandbox runs in"):
        SlurmSandbox(slurm.layout.directory).up()
    with pytest.raises(InfrastructureFailure, match="too deep"):
        SlurmSandbox(tmp_path / ("d" * 90)).up()
    assert slurm.node_state("node0") == "idle"


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")
def test_without_root(slurm: SlurmSandbox, unprivileged: Path):
    answers: multiprocessing.Queue[str] = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(target=use_as_nobody, args=(unprivileged, answers))
    child.start()
    assert answers.get(timeout=60) == "nobody nobody\n"
    child.join(60)
    assert child.exitcode == 0
    assert living_by(unprivileged) == []


def test_a_silent_nodes_job_is_requeued_while_its_tasks_run_on(silenced: HetJob):
    assert silenced.sandbox.wait(silenced.id, "PENDING") == {silenced.id: "PENDING"}
    assert silenced.sandbox.node_state("node1") == "down*"
    assert psutil.pid_exists(int(silenced.env(0)["SLURM_TASK_PID"]))
    assert silenced.signals(0) == []


def test_another_sandbox_beside_it_leaves_no_process_behind(silenced: HetJob, slurm: SlurmSandbox):
    directory = silenced.sandbox.layout.directory
    lines = subprocess.run(
        [*CLI, "env", "--dir", directory], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    ask = f"{lines}\nsinfo --noheader --format='%R %D %G'"
    seen = subprocess.run(["bash", "-c", ask], check=True, capture_output=True, text=True).stdout
    assert seen.splitlines() == ["all 2 (null)", "cpu 1 (null)", "preemptible 2 (null)"]
    alive = living_by(directory)
    assert {"munged", "slurmctld", "slurmd", "slurmstepd"} <= {process.name() for process in alive}
    assert int(silenced.env(0)["SLURM_TASK_PID"]) in {process.pid for process in alive}
    subprocess.run([*CLI, "down", "--dir", directory], cwd=ROOT, check=True)
    assert living_by(directory) == []
    assert slurm.run(["sinfo", "--noheader", "--partition=all", "--format=%D %T"]).stdout == "5 idle\n"


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory that nobody owns, in a place that all may reach."""
    directory = Path(tempfile.mkdtemp())
    os.chown(directory, NOBODY, NOBODY)
    yield directory
    shutil.rmtree(directory)


def use_as_nobody(directory: Path, answers: "multiprocessing.Queue[str]") -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.chdir("/")
    with SlurmSandbox(directory, nodes=2) as sandbox:
        answers.put(sandbox.run(["srun", "--nodes=2", "whoami"]).stdout.replace("\n", " ", 1))


def living_by(directory: Path) -> list[psutil.Process]:
    """Processes that work in a sandbox's directory or follow its configuration."""
    conf = str(directory / "etc" / "slurm.conf")
    return [process for process in psutil.process_iter() if belongs(process, str(directory), conf)]


def belongs(process: psutil.Process, directory: str, conf: str) -> bool:
    try:
        lives = process.status() != psutil.STATUS_ZOMBIE
        return lives and (process.cwd() == directory or process.environ().get("SLURM_CONF") == conf)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
