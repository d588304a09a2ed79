"""The batch script's process: the supervisor of the steps of its job.

    python -m prime_hpc.launchers.slurm.batch PLAN.json [--job NAME]

A job that Slurm starts again, and a successor, go on with the run as a new attempt. The main job's process alone holds
the lease and the run's secrets; it drains the run before the time limit, and has it go on after that.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from prime_hpc.cluster import secrets
from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.cluster.lease import FILE as LEASE_FILE
from prime_hpc.cluster.lease import LeaseKeeper
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import COMPLETE_MARK, DRAIN_MARK
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import DeadlineExceeded, PrimeHPCError
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.launchers.slurm.allocation import MAIN, Job, jobs
from prime_hpc.launchers.slurm.deadline import Deadline
from prime_hpc.launchers.slurm.executor import submit
from prime_hpc.launchers.slurm.starter import StepStarter
from prime_hpc.launchers.supervisor import Supervisor
from prime_hpc.launchers.verdict import EXIT_INTERRUPTED, verdict
from prime_hpc.launchers.view import PlainView, View
from prime_hpc.plan.run_plan import RunPlan, load

POLL_S = 0.5


class Alarm:
    """Why the run should leave the job: a signal that Slurm has sent, or the time limit."""

    def __init__(self, deadline: Deadline):
        self._deadline = deadline
        self._told: str | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._note)

    def __call__(self) -> str | None:
        return self._told or self._deadline.reached()

    def _note(self, number: int, _: object) -> None:
        self._told = f"Slurm sent {signal.Signals(number).name}"


def run_job(plan: RunPlan, job: Job) -> int:
    """Run every unit of `job` in the allocation around this process. Returns an exit code."""
    config, paths, job_id = plan.typed_config(), RunPaths(Path(plan.run_dir)), os.environ["SLURM_JOB_ID"]
    view, deadline = PlainView(Console(width=200)), Deadline(paths, job_id)
    if too_short := deadline.too_short():
        view.say(too_short)
        return 1
    main = job.name == MAIN
    with _lease(plan, config, paths) if main else _lease_of_another(plan, config, paths):
        supervisor = Supervisor(plan, config, paths, StepStarter(plan), view, units=job.units(plan), leads=main,
                                alarm=Alarm(deadline))  # fmt: skip
        interrupted = None
        try:
            ending = supervisor.run()
        except KeyboardInterrupt:
            interrupted = "interrupted"
            return EXIT_INTERRUPTED
        finally:
            supervisor.stop(interrupted)
    code = verdict(ending, paths, view)
    if main and ending.goes_on:
        _go_on(plan, config, job_id, view)
    return code


def next_attempt(plan: RunPlan) -> RunPlan | None:
    """The plan to run: `plan` itself the first time, a new attempt where it was run before, None for a finished run.

    Raises:
        ConfigurationError, CorruptData: the run cannot go on from its newest checkpoint.
    """
    paths = RunPaths(Path(plan.run_dir))
    marks, config = list_fresh(paths.rendezvous), plan.typed_config()
    if LEASE_FILE not in marks or (read_json(paths.rendezvous / LEASE_FILE) or {})["attempt"] < plan.attempt:
        return plan
    steps = (read_json(paths.summary) or {}).get("steps", 0)
    if COMPLETE_MARK in marks and (DRAIN_MARK not in marks or steps >= config.max_steps):
        return None
    config = replace(config, resume="auto", run=replace(config.run, name=plan.name, output_dir=str(paths.root.parent)))
    start = RunStart.resolve(config, experiment=None, origins=[])
    start.write(config_too=False)
    return start.plan


def _go_on(plan: RunPlan, config: RunConfig, job_id: str, view: View) -> None:
    """Have Slurm run this job again, or submit a successor that starts once this job has ended."""
    if config.cluster.requeue:
        view.say("going on in this job, which Slurm starts again")
        subprocess.run(["scontrol", "requeue", job_id], check=True)
        time.sleep(config.cluster.lease_s)  # Slurm ends this process
    else:
        view.say(f"going on in {submit(plan, after=job_id).job_ids[0]}")


@contextmanager
def _lease(plan: RunPlan, config: RunConfig, paths: RunPaths) -> Iterator[None]:
    """The lease of the attempt and the run's secrets, which exist before it and as long as it."""
    secrets.create(paths.root)
    lease = LeaseKeeper(paths.rendezvous, plan.attempt, config.cluster.lease_s)
    try:
        yield
    finally:
        lease.close()
        secrets.remove(paths.root)


@contextmanager
def _lease_of_another(plan: RunPlan, config: RunConfig, paths: RunPaths) -> Iterator[None]:
    """The main job's process holds the lease; its first beat is waited for."""
    deadline = time.monotonic() + config.cluster.start_timeout_s
    while (read_json(paths.rendezvous / LEASE_FILE) or {}).get("attempt") != plan.attempt:
        list_fresh(paths.rendezvous)
        if time.monotonic() > deadline:
            raise DeadlineExceeded("this job", "the lease", "the main job", config.cluster.start_timeout_s)
        time.sleep(POLL_S)
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--job", default=MAIN)
    arguments = parser.parse_args()
    try:
        written = load(arguments.plan)
        plan = next_attempt(written) if arguments.job == MAIN else written
        if plan is None:
            sys.exit(f"{arguments.plan.parent} is complete")
        sys.exit(run_job(plan, next(job for job in jobs(plan) if job.name == arguments.job)))
    except PrimeHPCError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
