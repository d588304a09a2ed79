"""Submitted jobs: their state from Slurm's lists, the process that failed first, and the logs of processes."""

import os
import pickle
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from submitit.core.utils import FailedJobError

from prime_hpc.config.schema import parse
from prime_hpc.launchers.slurm.jobs import GroupWatcher, RunJob
from prime_hpc.plan.build import Attempt, build_plan

HEADER = "JobID|State|NodeList"


@pytest.mark.parametrize(
    ("lines", "state", "nodes"),
    [
        (["7+0|RUNNING|n0", "7+1|PENDING|", "7+2|COMPLETED|n3"], "RUNNING", "n0,,n3"),
        (["7+0|COMPLETED|n0", "7+1|CANCELLED by 0|n1", "7+2|FAILED|n3"], "FAILED", "n0,n1,n3"),
        (["7+0|COMPLETED|n0", "7+1|COMPLETED|n1"], "COMPLETED", "n0,n1"),
        (["7+0|PENDING|", "7+1|PENDING|"], "PENDING", ","),
        (["7|TIMEOUT|n0"], "TIMEOUT", "n0"),
        (["7.batch|RUNNING|n0", "7|OUT_OF_MEMORY|n0"], "OUT_OF_MEMORY", "n0"),
    ],
)
def test_a_job_has_the_state_of_its_liveliest_or_worst_group(lines: list[str], state: str, nodes: str) -> None:
    found = GroupWatcher().read_info("\n".join([HEADER, *lines, "8+0|COMPLETED|n9"]))
    assert found["7"] == {"JobID": "7", "State": state, "NodeList": nodes}
    assert found["8"]["State"] == "COMPLETED"


@pytest.fixture
def run(tmp_path: Path) -> RunJob:
    """A job of an orchestrator, an environment worker, an engine and two ranks; nothing has ended."""
    given = ["launcher.name=slurm_hetjob", "cluster.gpus_per_node=0", "trainer.ranks=2", "env.workers=1",
             "env.train=[{id: words}]"]  # fmt: skip
    config = parse(OmegaConf.to_container(OmegaConf.from_dotlist(given)))
    return RunJob(build_plan(config, tmp_path, Attempt(), gpus=0), ["7"])


def end(job: RunJob, name: str, outcome: tuple[str, object], at_s: float) -> None:
    """Leave the result of a process as submitit would."""
    path = job.process(name).paths.result_pickle
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(outcome))
    os.utime(path, (at_s, at_s))


NAMES = ["orchestrator-0", "env-words-0", "inference-0", "trainer-0", "trainer-1"]


def test_results_come_in_the_order_of_the_plan(run: RunJob) -> None:
    for at, name in enumerate(reversed(NAMES)):
        end(run, name, ("success", {"process": name}), at)
    assert [result["process"] for result in run.results()] == NAMES
    assert run.exception() is None


def test_the_process_that_failed_first_is_blamed(run: RunJob) -> None:
    end(run, "env-words-0", ("success", {}), 1)
    end(run, "trainer-1", ("error", "the cause"), 2)
    for at, name in enumerate(("orchestrator-0", "inference-0", "trainer-0"), start=3):
        end(run, name, ("error", "told to stop"), at)
    with pytest.raises(FailedJobError, match="the cause"):
        run.results()
    assert "the cause" in str(run.exception())


def test_the_output_of_a_process_is_its_newest_log(run: RunJob, tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    for name in ("trainer-1.log", "trainer-1.restart_2.log", "trainer-1.restart_10.log", "trainer-0.restart_11.log"):
        (logs / name).write_text(name)
    assert run.process("trainer-1").stdout() == "trainer-1.restart_10.log"
    assert run.task(3).stdout() == "trainer-0.restart_11.log"
    assert run.process("inference-0").stdout() is None
