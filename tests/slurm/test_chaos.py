"""What Slurm and its nodes do to a run: it goes on by itself, trains no step twice on different data, loses none, and
leaves no process of an earlier attempt behind."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prime_hpc.cluster.faults import Fault
from tests.disks import mounted
from tests.slurm.slurm_runs import SLOW_TOKENS, SlurmRun, assert_whole, lives
from tools.slurm_sandbox import SlurmSandbox

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
LEASE_S = 10


def assert_gone_on(run: SlurmRun, steps: int) -> None:
    """The run is whole after its job was started a second time."""
    assert_whole(run, steps)
    assert run.attempts == [1, 2]


@pytest.mark.parametrize("requeue", [True, False], ids=["requeue", "successor"])
def test_a_run_saves_before_the_time_limit_and_goes_on(
    requeue: bool, slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    """Every save takes 8 s, so the run must leave early enough for one."""
    long_saves = [Fault(process="trainer-0", point="save.during", action="sleep", seconds=8, count=n)
                  for n in range(1, 40)]  # fmt: skip
    run = SlurmRun(slurm, tmp_path, tiny_model, "limited", "max_steps=80", "cluster.time='00:04:00'",
                   "cluster.signal_s=30", f"cluster.requeue={requeue}".lower(), SLOW_TOKENS,
                   faults=long_saves)  # fmt: skip
    run.until_complete()
    assert_whole(run, 80)
    assert "draining, as the supervisor asked" in run.output
    jobs = {path.stem.removeprefix("job_") for path in (run.root / "logs").glob("job_*.log")}
    assert (len(jobs) == 1) == requeue and len(run.attempts) > 1
    for job in jobs:
        assert slurm.accounted(job, "COMPLETED")


def test_a_killed_supervisor_leaves_no_process_and_the_run_can_be_resumed(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    given = ("max_steps=20", "cluster.lease_s=4")
    run = SlurmRun(slurm, tmp_path, tiny_model, "headless", *given)
    run.until_step(4)
    run.batch.kill()
    run.until(lambda: not run.survivors(), "the end of every process", 60)
    again = SlurmRun(slurm, tmp_path, tiny_model, "headless", *given, "resume=auto")
    again.until_complete()
    assert_gone_on(again, 20)


def test_a_cancelled_component_has_the_job_start_again(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "part", "max_steps=20")
    run.until_step(5)
    slurm.run(["scancel", str(int(run.job.job_id) + 1)])
    run.until_complete()
    assert_gone_on(run, 20)
    assert slurm.accounted(run.job.job_id, "COMPLETED")


@pytest.mark.parametrize("node", ["node4", "node0"], ids=["of a trainer rank", "of the supervisor"])
def test_what_wakes_on_a_node_that_was_given_up_leaves_the_run_to_its_successor(
    node: str, tmp_path: Path, tiny_model: Path
) -> None:
    """slurmd is gone, and a process of the node stands still until the run has gone on without it, on a sixth node."""
    with SlurmSandbox(tmp_path / "slurm", nodes=6) as slurm:
        run = SlurmRun(slurm, tmp_path, tiny_model, "silent", "max_steps=30", f"cluster.lease_s={LEASE_S}")
        run.until_step(5)
        sleeper = psutil.Process(run.record("trainer-1")["pid"]) if node == "node4" else run.batch
        sleeper.suspend()
        slurm.kill_slurmd(node)
        slurm.give_up(node)
        run.until(lambda: run.attempts == [1, 2], "the second attempt")
        run.until_step(max(run.reported) + 3)
        assert lives(sleeper)
        sleeper.resume()
        run.until(lambda: not lives(sleeper), "its end", 60)
        run.until_complete()
        assert_gone_on(run, 30)
        assert not [event for event in run.events if event["attempt"] == 2 and event["kind"] in ("exit", "hang")]


def test_a_lost_node_has_the_job_start_again(slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "node", "max_steps=20")
    run.until_step(5)
    slurm.kill_node("node4")
    slurm.give_up("node4")
    slurm.wait(run.job.job_id, "PENDING")
    slurm.restart_slurmd("node4")
    run.until_complete()
    assert_gone_on(run, 20)


def test_a_preempted_run_goes_on_when_the_nodes_are_free_again(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model, "preempted", "max_steps=40", "cluster.partition=preemptible")
    run.until_step(5)
    urgent = slurm.submit("--partition=gpu", "--nodes=1", "--cpus-per-task=4", "--output=/dev/null", "--wrap=sleep 5")
    slurm.wait(urgent, "RUNNING", "COMPLETED")
    assert "PENDING" in slurm.states(run.job.job_id).values()
    run.until_complete()
    assert_gone_on(run, 40)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A shared directory of 80 MB."""
    with mounted(tmp_path / "shared", mebibytes=80) as folder:
        yield folder


def test_a_full_shared_directory_is_waited_for(shared: Path, tmp_path: Path, tiny_model: Path) -> None:
    with SlurmSandbox(tmp_path / "slurm") as slurm:
        run = SlurmRun(slurm, shared, tiny_model, "full", "max_steps=30")
        run.until_step(5)
        ballast = shared / "ballast"
        subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=64k"], capture_output=True)
        run.until(lambda: "it is tried again" in run.log("trainer-0") + run.log("orchestrator-0"), "a full disk")
        ballast.unlink()
        run.until_complete()
        assert_whole(run, 30)
        assert run.attempts == [1]


def test_spares_take_the_place_of_an_unfit_node_and_of_a_lost_one(tmp_path: Path, tiny_model: Path) -> None:
    parts = {"orchestrator": "node[0-1]", "inference": "node[2-3]", "trainer": "node[4-5]"}
    given = [f"cluster.components.{name}={{nodes: 1, spare_nodes: 1, directives: {{nodelist: '{nodes}'}}}}"
             for name, nodes in parts.items()]  # fmt: skip
    with SlurmSandbox(tmp_path / "slurm", nodes=6) as slurm:
        outputs = tmp_path / "outputs"
        outputs.mkdir()
        slurm.hide("node4", outputs)
        run = SlurmRun(slurm, outputs, tiny_model, "spares", "max_steps=60", *given)
        run.until_step(5)
        assert run.record("trainer-0")["host"] == run.record("trainer-1")["host"] == "node5"
        assert "node5 takes the place of node4, which is not fit: node4: shared folder: no folder" in run.output
        os.kill(run.record("env-reverse_text-0")["pid"], signal.SIGKILL)
        slurm.kill_node("node2")
        slurm.give_up("node2")
        run.until(lambda: "node3 takes the place of node2" in run.output, "the spare")
        run.until_complete()
        assert_whole(run, 60)
        assert run.attempts == [1]
        assert run.record("inference-0")["host"] == "node3"
