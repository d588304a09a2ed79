"""Submission through submitit: one job a batch script, the pickled task beside the results of every step."""

import io
import os
import re
import shutil
import subprocess
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmExecutor

from prime_hpc.cluster.files import read_json, write_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.launchers.slurm.allocation import Job, jobs, script_name
from prime_hpc.launchers.slurm.jobs import LIVE, RunJob
from prime_hpc.launchers.slurm.queue import certain_state, state
from prime_hpc.launchers.slurm.sbatch import render_script, write_scripts
from prime_hpc.launchers.slurm.task import RoleTask
from prime_hpc.plan.run_plan import RunPlan

WORKING = ("RUNNING", "CONFIGURING", "PENDING", "REQUEUED", "SUSPENDED")
NO_CONTROLLER = re.compile(r"establish a configuration source|[Uu]nable to contact slurm controller")
"""In what sbatch says on a machine that belongs to no cluster, or whose controller is down."""


class JobExecutor(SlurmExecutor):
    """Submits one job of a plan: its own batch script in place of submitit's, every task a process of the plan."""

    def __init__(self, plan: RunPlan, job: Job, dependency: str | None = None):
        super().__init__(RunPaths(Path(plan.run_dir)).slurm)
        self.plan, self.job, self.dependency = plan, job, dependency

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render_script(self.plan, self.job)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        after = [f"--dependency={self.dependency}", "--kill-on-invalid-dep=yes"] if self.dependency else []
        return ["sbatch", *after, str(Path(self.plan.run_dir) / script_name(self.job))]

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        [submitted] = super()._internal_process_submissions(delayed_submissions)
        _share(self.plan, self.job, submitted.paths.submitted_pickle)
        return [submitted]


def submit(plan: RunPlan, after: str | None = None) -> RunJob:
    """Write the batch scripts of a plan and submit them, those of linked jobs to start no sooner than the main one.

    The main job of a successor starts once the job `after` has ended.

    Raises:
        InfrastructureFailure: there is no Slurm here, or it refuses a job; jobs submitted before are cancelled.
    """
    if shutil.which("sbatch") is None:
        raise InfrastructureFailure("there is no sbatch on this machine: submit from a login node of the cluster, or "
                                    "write the files of the run with launcher=dry_run")  # fmt: skip
    paths = RunPaths(Path(plan.run_dir))
    paths.slurm.mkdir(parents=True, exist_ok=True)
    write_scripts(plan)
    ids: list[str] = []
    slot = ["singleton"] if plan.typed_config().launcher.slot else []
    for job in jobs(plan):
        waits = [f"after:{ids[0]}"] if ids else slot + ([f"afterany:{after}"] if after else [])
        try:
            ids.append(_submit(plan, job, ",".join(waits)))
        except InfrastructureFailure:
            for submitted in ids:
                subprocess.run(["scancel", submitted])
            raise
    write_json(paths.job, {"attempt": plan.attempt, "job_ids": ids})
    return RunJob(plan, ids)


def submit_missing(plan: RunPlan) -> None:
    """In the main job of a run that goes on: submit those linked jobs anew that have ended meanwhile.

    Raises:
        InfrastructureFailure: Slurm refuses one.
    """
    paths = RunPaths(Path(plan.run_dir))
    ids: list[str] = (read_json(paths.job) or {})["job_ids"]
    for number, job in enumerate(jobs(plan)[1:], 1):
        if state(ids[number]) not in LIVE:
            ids[number] = _submit(plan, job)
    write_json(paths.job, {"attempt": plan.attempt, "job_ids": ids})


def _submit(plan: RunPlan, job: Job, dependency: str | None = None) -> str:
    """The id of the submitted job."""
    try:
        with redirect_stderr(io.StringIO()):  # where submitit prints what its error says too
            submitted = JobExecutor(plan, job, dependency).submit(RoleTask(RunPaths(Path(plan.run_dir)).plan))
    except RuntimeError as error:  # the base of what submitit raises, sbatch's own words included
        told = str(error)
        if NO_CONTROLLER.search(told):
            raise InfrastructureFailure(f"Slurm does not answer here: {told.splitlines()[0]}; launcher=dry_run writes "
                                        "the files of the run without it") from error  # fmt: skip
        raise InfrastructureFailure(f"{script_name(job)} was not submitted: {told}") from error
    return str(submitted.job_id)


def adopt(plan: RunPlan, job_id: str) -> Job:
    """Make the job around this process that of the plan, as if it had been submitted for it."""
    paths, job = RunPaths(Path(plan.run_dir)), jobs(plan)[0]
    pickle = JobPaths(paths.slurm, job_id).submitted_pickle
    pickle.parent.mkdir(parents=True, exist_ok=True)
    DelayedSubmission(RoleTask(paths.plan)).dump(pickle)
    _share(plan, job, pickle)
    write_json(paths.job, {"attempt": plan.attempt, "job_ids": [job_id]})
    return job


def _share(plan: RunPlan, job: Job, pickle: Path) -> None:
    """Give the steps of a job its task: submitit looks for it where a step's results are written."""
    for unit in job.units(plan):
        link = pickle.parent / unit.name / pickle.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", pickle.name))


def refuse_live(paths: RunPaths) -> None:
    """Refuse a new attempt beside the job of an earlier one, unless that is around this process: both would write into
    one run.

    Raises:
        InfrastructureFailure: the run's main job waits or runs, or Slurm does not tell.
    """
    first = next(iter((read_json(paths.job) or {}).get("job_ids", [])), None)
    if first in (None, os.environ.get("SLURM_JOB_ID")):
        return
    if (now := certain_state(first)) in WORKING:
        raise InfrastructureFailure(f"job {first} of this run is {now.lower()}: wait for it, or end it by "
                                    f"python -m prime_hpc.stop {paths.root}")  # fmt: skip


def find(plan: RunPlan) -> RunJob | None:
    """The submitted jobs of a run, from what its directory says; None for a run that was not submitted."""
    record = read_json(RunPaths(Path(plan.run_dir)).job)
    return RunJob(plan, record["job_ids"]) if record else None
