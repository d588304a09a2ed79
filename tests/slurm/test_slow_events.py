"""Events that Slurm notices late, awaited together: the end of a time limit and a node that fell silent."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.slurm.hetjobs import TASK, Component, HetJob, submit
from tools.slurm_sandbox import SlurmSandbox
from tools.slurm_sandbox.waiting import wait_for

pytestmark = pytest.mark.slurm


@dataclass(frozen=True)
class Events:
    sandbox: SlurmSandbox
    limited: HetJob
    """Its limit is a minute, and it asked its batch script to be told 50 s before."""
    lost: HetJob
    """Its node lost slurmd but no process."""


@pytest.fixture(scope="module")
def events(slurm_sandbox: SlurmSandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Events]:
    parts = [Component("--partition=cpu --time=1 --signal=B:USR1@50"), Component("--partition=gpu --nodelist=node1")]
    limited = submit(slurm_sandbox, tmp_path_factory.mktemp("limited"), parts)
    lost = submit_plain(slurm_sandbox, tmp_path_factory.mktemp("lost"), "--nodelist=node4")
    limited.wait_for_tasks()
    lost.wait_for_tasks()
    slurm_sandbox.kill_slurmd("node4")
    yield Events(slurm_sandbox, limited, lost)
    lost.finish()
    slurm_sandbox.restart_slurmd("node4")
    slurm_sandbox.cancel_jobs()


def submit_plain(sandbox: SlurmSandbox, folder: Path, options: str) -> HetJob:
    """One task in the batch step of an ordinary job."""
    command = f"exec {sys.executable} {TASK} 0.0 end"
    job = sandbox.submit(f"--chdir={folder}", options, f"--wrap={command}")
    return HetJob(sandbox, folder, job, [Component("")])


def test_signal_before_the_limit_reaches_the_batch_script_alone(events: Events):
    wait_for(events.limited.batch_signals, "USR1", "slurmctld", 60.0)
    assert events.limited.batch_signals() == ["USR1"]
    assert [events.limited.signals(group) for group in range(2)] == [[], []]
    assert set(events.sandbox.states(events.limited.id).values()) == {"RUNNING"}


def test_a_silent_nodes_job_is_requeued_while_its_tasks_run_on(events: Events):
    lost = events.lost
    events.sandbox.wait(lost.id, "PENDING")
    assert events.sandbox.node_state("node4") == "down*"
    assert psutil.pid_exists(int(lost.env(0)["SLURM_TASK_PID"]))
    assert lost.signals(0) == []
