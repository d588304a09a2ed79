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
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.cluster.lease import EXIT_FENCED, LeaseKeeper
from prime_hpc.cluster.lease import FILE as LEASE_FILE
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import COMPLETE_MARK, DRAIN_MARK
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import DeadlineExceeded, NodesLost, PrimeHPCError
from prime_hpc.launchers import credentials
from prime_hpc.launchers.claims import give_back
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.launchers.slurm.allocation import MAIN, Job, jobs
from prime_hpc.launchers.slurm.deadline import Deadline
from prime_hpc.launchers.slurm.executor import submit, submit_missing
from prime_hpc.launchers.slurm.hosts import Hosts
from prime_hpc.launchers.slurm.queue import STARTED, SUBMITTED, moment, state
from prime_hpc.launchers.slurm.starter import StepStarter
from prime_hpc.launchers.startup import Startup
from prime_hpc.launchers.supervisor import Supervisor
from prime_hpc.launchers.verdict import EXIT_INTERRUPTED, verdict
from prime_hpc.launchers.view import PlainView, View
from prime_hpc.observe.console import open_console
from prime_hpc.plan.run_plan import RunPlan, load

POLL_S = 0.5


class Alarm:
    """Why the run should leave the job: a signal that Slurm has sent, or the time limit.

    A supervisor that stood still while another took over must not act on what it finds; so it looks at the lease first.
    """

    def __init__(self, deadline: Deadline, lease: LeaseKeeper | None):
        self._deadline, self._lease = deadline, lease
        self._told: str | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._note)

    def __call__(self) -> str | None:
        if self._lease:
            self._lease.leave_if_lost()
        return self._told or self._deadline.reached()

    def _note(self, number: int, _: object) -> None:
        self._told = f"Slurm sent {signal.Signals(number).name}"


def run_job(plan: RunPlan, job: Job) -> int:
    """Run every unit of `job` in the allocation around this process. Returns an exit code."""
    config, paths, job_id = plan.typed_config(), RunPaths(Path(plan.run_dir)), os.environ["SLURM_JOB_ID"]
    main, units, deadline = job.name == MAIN, job.units(plan), Deadline(paths, job_id)
    view: View = PlainView(open_console())
    view = _measured(view, plan, paths, job_id) if main else view
    if too_short := deadline.too_short():
        view.say(too_short)
        return 1
    with _lease(plan, config, paths) if main else nullcontext() as lease:
        hosts = Hosts(plan, job, view.say)
        hosts.settle(units)
        supervisor = Supervisor(plan, config, paths, StepStarter(plan, hosts), view, units=units, leads=main,
                                alarm=Alarm(deadline, lease))  # fmt: skip
        interrupted = None
        try:
            ending = supervisor.run()
            code, goes_on = verdict(ending, paths, view), ending.goes_on
        except NodesLost as lost:
            interrupted, code, goes_on = str(lost), 1, True
            view.say(interrupted)
        except KeyboardInterrupt:
            interrupted, code, goes_on = "interrupted", EXIT_INTERRUPTED, False
        finally:
            supervisor.stop(interrupted)
    if goes_on and config.mode != "serve" and (reason := deadline.fruitless()):
        view.say(reason)
        return 1
    if goes_on:
        _go_on(plan, job, job_id, view)
    return code


def run_linked(name: str, path: Path) -> int:
    """Run the units of the linked job `name` for one attempt of the main job after the other, until the run ends.

    Raises:
        DeadlineExceeded: the main job does not start, or not again.
    """
    paths, attempt, code = RunPaths(path.parent), 0, EXIT_FENCED
    while code == EXIT_FENCED:
        plan = _await_main(paths, attempt, load(path).typed_config().cluster.start_timeout_s)
        if os.environ["SLURM_JOB_ID"] not in (read_json(paths.job) or {"job_ids": []})["job_ids"]:
            print("the run goes on with other jobs")
            return 0
        attempt, code = plan.attempt, run_job(plan, next(job for job in jobs(plan) if job.name == name))
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
    if COMPLETE_MARK in marks and (DRAIN_MARK not in marks or config.evaluates_alone or steps >= config.max_steps):
        return None
    config = replace(config, resume="auto", run=replace(config.run, name=plan.name, output_dir=str(paths.root.parent)))
    start = RunStart.resolve(config, experiment=None, origins=[])
    start.write(config_too=False)
    return start.plan


def _go_on(plan: RunPlan, job: Job, job_id: str, view: View) -> None:
    """Have Slurm run this job again, or submit a successor of the run that starts once this job has ended."""
    cluster = plan.typed_config().cluster
    if state(job_id) not in (None, "RUNNING"):
        view.say("Slurm has ended this job already")
    elif cluster.requeue:
        view.say("going on in this job, which Slurm starts again")
        # Slurm ends this process, and often scontrol before it has said anything
        asked = subprocess.run(["scontrol", "requeue", job_id], capture_output=True, text=True)
        view.say(asked.stderr.strip() or "asked Slurm for it")
        time.sleep(cluster.lease_s)
    elif job.name == MAIN:
        view.say(f"going on in {submit(plan, after=job_id).job_ids[0]}")


def _measured(view: View, plan: RunPlan, paths: RunPaths, job_id: str) -> View:
    """`view`, told of the time from the start of the job to the first step too."""
    submitted, started = moment(job_id, SUBMITTED), moment(job_id, STARTED)
    queued_s = started - submitted if started and submitted else None
    return Startup(plan, paths, view, started or time.time(), queued_s)


@contextmanager
def _lease(plan: RunPlan, config: RunConfig, paths: RunPaths) -> Iterator[LeaseKeeper]:
    """The lease of the attempt, and what it has as long: the run's secrets, and its claim on engines of another run."""
    credentials.provide(config, paths.root)
    lease = LeaseKeeper(paths.rendezvous, plan.attempt, config.cluster.lease_s)
    try:
        yield lease
    finally:
        lease.close()
        if lease.held():  # else they are those of a newer attempt
            give_back(config, paths)
            credentials.discard(config, paths.root)


def _await_main(paths: RunPaths, attempt: int, timeout_s: float) -> RunPlan:
    """The plan of an attempt later than `attempt`, once the main job's process holds its lease."""
    deadline = time.monotonic() + timeout_s
    while True:
        list_fresh(paths.rendezvous)
        held, plan = (read_json(paths.rendezvous / LEASE_FILE) or {}).get("attempt", 0), load(paths.plan)
        if held == plan.attempt > attempt:
            return plan
        if time.monotonic() > deadline:
            raise DeadlineExceeded("this job", "the lease", "the main job", timeout_s)
        time.sleep(POLL_S)


def run_main(path: Path) -> int:
    """Run the main job: the first attempt, or a new one where the run was begun before."""
    written = load(path)
    plan = next_attempt(written)
    if plan is None:
        print(f"{path.parent} is complete")
        return 1
    if plan.attempt > written.attempt:
        submit_missing(plan)
    return run_job(plan, jobs(plan)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--job", default=MAIN)
    arguments = parser.parse_args()
    try:
        main_job = arguments.job == MAIN
        sys.exit(run_main(arguments.plan) if main_job else run_linked(arguments.job, arguments.plan))
    except PrimeHPCError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
