"""A new attempt beside the job of an earlier one, by what squeue says of that job."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_hpc.commands import stop
from prime_hpc.config.schema import parse
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.launchers import registry
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.launchers.slurm.executor import refuse_live
from prime_hpc.plan.build import Attempt, build_plan
from tests.unit.run_dirs import RunDir

FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Stands for squeue on a machine that has no other command of Slurm."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def say(script: str) -> None:
        (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "squeue").chmod(0o755)

    return say


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "mine")
    made.paths.job.write_text(json.dumps({"attempt": 1, "job_ids": ["41"]}))
    return made


def test_a_job_that_waits_or_of_which_nothing_is_known_refuses_another_attempt(run, squeue, monkeypatch) -> None:
    refuse_live(run.paths)  # there is no Slurm here
    squeue("echo 41 COMPLETED")
    refuse_live(run.paths)
    squeue(f"echo '{FORGOTTEN}' >&2; exit 1")
    refuse_live(run.paths)
    squeue("echo 41 PENDING")
    with pytest.raises(InfrastructureFailure, match="job 41 of this run is pending"):
        refuse_live(run.paths)
    squeue(f"echo '{DOWN}' >&2; exit 1")
    with pytest.raises(InfrastructureFailure, match="does not tell whether job 41 waits or runs: .*Unable to contact"):
        refuse_live(run.paths)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    refuse_live(run.paths)  # from within that job


def test_a_local_attempt_is_refused_too_and_writes_nothing(run, squeue, monkeypatch) -> None:
    squeue("echo 41 PENDING")
    monkeypatch.setattr(registry, "run_local", lambda *_: pytest.fail("it was started"))
    config = parse({"run": {"output_dir": str(run.paths.root.parent), "name": "mine"}})
    start = RunStart(config, build_plan(config, run.paths.root, Attempt(number=2), gpus=0), [])
    with pytest.raises(InfrastructureFailure, match="job 41 of this run is pending"):
        registry.launch_plan(start)
    assert not run.paths.logs(2).exists()


def test_without_slurm_a_run_that_was_submitted_elsewhere_has_nothing_to_stop(run, squeue, capsys) -> None:
    plan = build_plan(parse({}), run.paths.root, Attempt(), gpus=0)
    run.paths.plan.write_bytes(plan.dump())
    assert stop.main([str(run.paths.root)]) == 2
    assert "has no supervisor at work" in capsys.readouterr().err
