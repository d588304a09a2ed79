"""What Slurm does with heterogeneous jobs, as docs/slurm_sandbox.md says it; the launcher is built on this."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm.hetjobs import Component, HetJob, submit
from tools.slurm_sandbox import SlurmSandbox
from tools.slurm_sandbox.waiting import wait_for

pytestmark = pytest.mark.slurm

RUN = [
    Component("--job-name=orchestrator --partition=cpu"),
    Component("--job-name=inference --partition=gpu --gpus-per-node=2", nodes=2),
    Component("--job-name=trainer --partition=gpu --gpus-per-node=virtual:1", nodes=2, tasks=2),
]
SPREAD = ["node0", "node[1-2]", "node[3-4]"]


@pytest.fixture(scope="module", autouse=True)
def limited(slurm_sandbox: SlurmSandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HetJob]:
    """A job whose limit is a minute and whose batch script asked to be told 50 s before. Slurm looks every 30 s, so
    the job starts before all tests and the last one asks for it."""
    parts = [Component("--partition=cpu --time=1 --signal=B:USR1@50"), Component("--partition=gpu --nodelist=node4")]
    job = submit(slurm_sandbox, tmp_path_factory.mktemp("limited"), parts)
    job.wait_for_tasks()
    yield job
    slurm_sandbox.cancel({job.id} & slurm_sandbox.jobs())


def test_variables_of_a_step_and_the_states_of_its_job(slurm: SlurmSandbox, tmp_path: Path):
    job = submit(slurm, tmp_path, RUN)
    job.wait_for_tasks()
    tasks = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    env = {task: job.env(*task) for task in tasks}
    assert {env[task]["SLURM_JOB_ID"] for task in tasks} == {job.id}
    assert {env[task]["SLURM_HET_SIZE"] for task in tasks} == {"3"}
    assert [env[task]["SLURM_PROCID"] for task in tasks] == ["0", "0", "1", "0", "1", "2", "3"]
    assert [env[task]["SLURM_NTASKS"] for task in tasks] == ["1", "2", "2", "4", "4", "4", "4"]
    assert [env[task]["SLURM_JOB_NODELIST"] for task in tasks] == [SPREAD[group] for group, _ in tasks]
    assert [env[task].get("CUDA_VISIBLE_DEVICES") for task in tasks] == [None, "0,1", "0,1", "0", "0", "0", "0"]
    for group in range(3):
        assert env[0, 0][f"SLURM_JOB_ID_HET_GROUP_{group}"] == job.raw_id(group)
        assert env[0, 0][f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] == SPREAD[group]
    assert [name for name in env[1, 0] if name in ("SLURM_HET_GROUP", "SLURM_HET_JOB_OFFSET", "SLURM_HET_JOB_ID")] == []
    job.finish()
    ids = [f"{job.id}+{group}" for group in range(3)]
    assert slurm.wait(job.id, "COMPLETED") == dict.fromkeys(ids, "COMPLETED")
    assert slurm.accounted(job.id, "COMPLETED", 3) == dict.fromkeys(ids, "COMPLETED")


def test_a_step_is_signalled_by_its_components_own_id(slurm: SlurmSandbox, tmp_path: Path):
    job = submit(slurm, tmp_path, RUN)
    job.wait_for_tasks()
    step = job.env(2)["SLURM_STEP_ID"]
    for wrong in (f"{job.id}.{step}", f"{job.id}+2.{step}"):
        assert slurm.run(["scancel", "--signal=USR1", wrong]).returncode == 0
    slurm.run(["scancel", "--signal=USR2", f"{job.raw_id(2)}.{step}"])
    for rank in range(4):
        job.wait_for_signal("SIGUSR2", 2, rank)
    assert [job.signals(2, rank) for rank in range(4)] == [["SIGUSR2"]] * 4
    assert [job.signals(0), job.signals(1), job.batch_signals()] == [[], [], []]


def test_a_component_is_signalled_by_its_own_id_and_all_by_leader_and_offset(slurm: SlurmSandbox, tmp_path: Path):
    job = submit(slurm, tmp_path, RUN)
    job.wait_for_tasks()
    slurm.run(["scancel", "--signal=USR1", job.raw_id(1)])
    job.wait_for_signal("SIGUSR1", 1, 1)
    slurm.run(["scancel", "--signal=USR2", f"{job.id}+1"])
    for group in range(3):
        job.wait_for_signal("SIGUSR2", group)
    assert [job.signals(group) for group in range(3)] == [["SIGUSR2"], ["SIGUSR1", "SIGUSR2"], ["SIGUSR2"]]
    assert job.batch_signals() == []


def test_overlap_starts_a_second_step_on_a_component_in_use(slurm: SlurmSandbox, tmp_path: Path):
    job = submit(slurm, tmp_path, RUN)
    job.wait_for_tasks()
    step = ["srun", f"--jobid={job.id}", "--het-group=1", "--nodes=2", "--ntasks=2", "--overlap"]
    assert sorted(slurm.run([*step, "printenv", "SLURMD_NODENAME"]).stdout.split()) == ["node1", "node2"]
    refused = slurm.run([*step[:-1], "--immediate=1", "true"], check=False)
    assert refused.returncode != 0 and refused.stdout == ""


def test_requeue_restarts_every_component_under_the_same_ids(slurm: SlurmSandbox, tmp_path: Path):
    job = submit(slurm, tmp_path, RUN)
    job.wait_for_tasks()
    refused = slurm.run(["scontrol", "requeue", job.raw_id(1)], check=False)
    assert refused.returncode != 0 and "not heterogeneous job leader" in refused.stderr
    slurm.run(["scontrol", "requeue", job.id])
    job.wait_for_tasks(starts=2)
    assert [job.env(group)["SLURM_RESTART_COUNT"] for group in range(3)] == ["1", "1", "1"]
    assert {job.env(group)["SLURM_JOB_ID"] for group in range(3)} == {job.id}


def test_losing_a_node_requeues_the_whole_job(slurm: SlurmSandbox, tmp_path: Path):
    job = submit(slurm, tmp_path, RUN)
    job.wait_for_tasks()
    with lost(slurm, "node2"):
        assert len(slurm.wait(job.id, "PENDING")) == 3
    # A task that ends at SIGTERM may do so before it sees the SIGCONT sent with it.
    assert [set(job.signals(group)) - {"SIGCONT"} for group in (0, 2)] == [{"SIGTERM"}] * 2


def test_with_no_kill_and_a_component_of_one_node_the_leader_is_requeued_alone(slurm: SlurmSandbox, tmp_path: Path):
    job = submit(slurm, tmp_path, with_no_kill(RUN), "--no-kill")
    job.wait_for_tasks()
    with lost(slurm, "node2"):
        ended = {f"{job.id}+0": "PENDING", f"{job.id}+1": "COMPLETED", f"{job.id}+2": "COMPLETED"}
        wait_for(lambda: slurm.states(job.id) == ended, f"{ended}", "slurmctld", 120.0)


def test_with_no_kill_and_two_nodes_a_component_the_job_goes_on(slurm: SlurmSandbox, tmp_path: Path):
    pair = [Component("--nodelist=node[0-1]", nodes=2), Component("--nodelist=node[2-3]", nodes=2)]
    job = submit(slurm, tmp_path, with_no_kill(pair), "--no-kill")
    job.wait_for_tasks()
    output = tmp_path / f"slurm-{job.id}.out"
    with lost(slurm, "node3"):
        wait_for(lambda: "Node failure" in output.read_text(), "srun's complaint", "srun", 120.0)
        slurm.run(["scancel", "--signal=USR1", job.id])
        for task in [(0, 0), (0, 1), (1, 0)]:
            job.wait_for_signal("SIGUSR1", *task)
        assert set(slurm.states(job.id).values()) == {"RUNNING"}


def test_signal_before_the_limit_reaches_the_batch_script_alone(limited: HetJob):
    wait_for(limited.batch_signals, "USR1", "slurmctld", 240.0)
    assert limited.batch_signals()[0] == "USR1"
    assert ["SIGUSR1" in limited.signals(group) for group in range(2)] == [False, False]


def with_no_kill(components: list[Component]) -> list[Component]:
    return [replace(part, options=f"{part.options} --no-kill") for part in components]


@contextmanager
def lost(slurm: SlurmSandbox, node: str) -> Iterator[None]:
    """A node that is gone with all that ran on it, alive again at the end."""
    slurm.kill_node(node)
    slurm.give_up(node)
    try:
        yield
    finally:
        slurm.restart_slurmd(node)
