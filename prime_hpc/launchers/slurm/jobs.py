"""Submitted jobs as submitit's users know them: state, cancel, results, exceptions and logs, of every process."""

import re
import subprocess
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, JobPaths, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.launchers.slurm.allocation import Job, jobs
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan

LIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "PENDING", "REQUEUED", "SUSPENDED")
FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "CANCELLED")
WATCH_S = 30


class GroupWatcher(SlurmInfoWatcher):
    """States of heterogeneous jobs, whose groups Slurm lists as `ID+0`, `ID+1`: that of the liveliest group, and once
    all have ended that of the worst. Asks squeue where the cluster keeps no accounts."""

    @cached_property
    def _has_accounts(self) -> bool:
        return subprocess.run(["sacct", "-n", "-X"], capture_output=True).returncode == 0

    def _make_command(self) -> list[str] | None:
        ids = ",".join(sorted(self._registered - self._finished))
        if not ids:
            return None
        if self._has_accounts:
            return ["sacct", "-X", "--parsable2", "-o", "JobID,State,NodeList", "-j", ids]
        return ["squeue", "-t", "all", "-o", "%i|%T|%N", "-j", ids]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """`JobID`, `State` and `NodeList` by job id, from the output of sacct or squeue."""
        text = string if isinstance(string, str) else string.decode()
        groups: dict[str, list[list[str]]] = {}
        for line in text.splitlines()[1:]:
            fields = line.split("|")
            if match := re.fullmatch(r"(\d+)(\+\d+)?", fields[0]):
                groups.setdefault(match[1], []).append(fields)
        return {job_id: _merge(job_id, sorted(rows)) for job_id, rows in groups.items()}


def _merge(job_id: str, rows: list[list[str]]) -> dict[str, str]:
    states = [row[1].split()[0] for row in rows]
    state = next((s for s in (*LIVE, *FAILED) if s in states), states[0])
    return {"JobID": job_id, "State": state, "NodeList": ",".join(row[2] for row in rows)}


class ProcessPaths(JobPaths):
    """Paths of one process: its output is its log in the run directory, the newest of its restarts."""

    def __init__(self, folder: Path, job_id: str, task_id: int, log: str):
        super().__init__(folder, job_id, task_id)
        self._log = Path(log)

    @property
    def stdout(self) -> Path:
        return max([self._log, *self._log.parent.glob(f"{self._log.stem}.restart_*.log")], key=_restart)

    @property
    def stderr(self) -> Path:
        return self.stdout


class ProcessJob(SlurmJob[dict[str, Any]]):
    """One process of a submitted run."""

    watcher = GroupWatcher(delay_s=WATCH_S)
    _results_timeout_s = 2

    def __init__(self, folder: Path, job_id: str, task: int, process: ProcessPlan):
        super().__init__(folder, job_id, (task,))
        self.process = process
        self._paths = ProcessPaths(folder, job_id, task, process.log)

    def _register_in_watcher(self) -> None:
        self.watcher.register_job(self.job_id)


class RunJob(SlurmJob[dict[str, Any]]):
    """A submitted run. `results()`, `stdout()` and `task(i)` go over its processes in the plan's order."""

    watcher = ProcessJob.watcher

    def __init__(self, plan: RunPlan, job_ids: Sequence[str]):
        """`job_ids` are those of `jobs(plan)`, in the same order."""
        super().__init__(RunPaths(Path(plan.run_dir)).slurm, job_ids[0])
        self.job_ids = list(job_ids)
        self._sub_jobs = [part for job, job_id in zip(jobs(plan), job_ids, strict=True)
                          for part in _processes(plan, job, job_id)]  # fmt: skip

    def process(self, name: str) -> ProcessJob:
        """The process of that name, e.g. `trainer-3`."""
        return next(job for job in self._sub_jobs if isinstance(job, ProcessJob) and job.process.name == name)

    def cancel(self, check: bool = True) -> None:
        """Cancel every job of the run."""
        (subprocess.check_call if check else subprocess.call)([self._cancel_command, *self.job_ids])

    def results(self) -> list[dict[str, Any]]:
        """What every process returned, in the plan's order.

        Raises:
            UncompletedJobError: the process that failed first.
        """
        if error := self.exception():
            raise error
        return super().results()

    def exception(self) -> UncompletedJobError | FailedJobError | None:
        """The error of the process that failed first, or of one that left no result; None for a good run."""
        self.wait()
        ended = [job for job in self._sub_jobs if job.paths.result_pickle.exists()]
        ended.sort(key=lambda job: job.paths.result_pickle.stat().st_mtime_ns)
        lost = [job for job in self._sub_jobs if job not in ended]
        errors = (job.exception() for job in [*ended, *lost])
        return next((error for error in errors if error is not None), None)


def _processes(plan: RunPlan, job: Job, job_id: str) -> list[ProcessJob]:
    folder = RunPaths(Path(plan.run_dir)).slurm
    return [ProcessJob(folder / unit.name, job_id, task, process)
            for unit in job.units(plan) for task, process in enumerate(unit.processes)]  # fmt: skip


def _restart(log: Path) -> int:
    number = log.stem.rpartition(".restart_")[2]
    return int(number) if number.isdigit() else 0
