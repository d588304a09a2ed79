"""When a job has to stop, by the end time that squeue tells and the run's own measurements."""

import datetime
import json
import os
import re
import time
from pathlib import Path

import pytest

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.launchers.slurm.deadline import Deadline


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run directory beside a squeue that prints the file `end`."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho 41 $(cat {tmp_path}/end)\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return RunPaths(tmp_path)


def end_in(run: RunPaths, seconds: float) -> None:
    (run.root / "end").write_text(datetime.datetime.fromtimestamp(time.time() + seconds).isoformat(timespec="seconds"))


def log_step(run: RunPaths, step: int, **metrics: float) -> None:
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "time": 0.0, **metrics}) + "\n")


def test_a_step_and_a_save_must_fit_before_the_end(run: RunPaths) -> None:
    log_step(run, 1, **{"time/step": 20.0, "time/save": 60.0})
    end_in(run, 85)
    assert re.fullmatch(r"8\d s are left of the job, but a step takes 20 s and a save 60 s: ask for more time .*",
                        Deadline(run, "41").too_short() or "")  # fmt: skip
    end_in(run, 120)
    assert Deadline(run, "41").too_short() is None
    assert Deadline(run, "41").reached() == "the job's time limit is near"
    end_in(run, 300)
    assert Deadline(run, "41").reached() is None


@pytest.mark.parametrize("end", ["N/A", "Unknown", ""])
def test_a_job_without_a_limit_has_no_deadline(run: RunPaths, end: str) -> None:
    (run.root / "end").write_text(end)
    deadline = Deadline(run, "41")
    assert (deadline.reached(), deadline.too_short(), deadline.fruitless()) == (None, None, None)


def test_a_job_in_which_no_step_was_made_is_not_repeated(run: RunPaths) -> None:
    log_step(run, 3)
    end_in(run, 20)
    deadline = Deadline(run, "41")
    assert deadline.fruitless() is None
    deadline.reached()
    assert deadline.fruitless() == (
        "the time limit came before the first step, and would again: ask for more time (cluster.time)")  # fmt: skip
    log_step(run, 4)
    assert deadline.fruitless() is None
