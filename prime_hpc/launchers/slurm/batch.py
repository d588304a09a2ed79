"""The batch script's process: starts one step for each restart unit of its job and ends when the run has ended.

    python -m prime_hpc.launchers.slurm.batch PLAN.json [--job NAME]

The first unit that fails stops the others. The main job's process alone holds the lease and the run's secrets.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_hpc.cluster import secrets
from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.cluster.lease import FILE as LEASE_FILE
from prime_hpc.cluster.lease import LeaseKeeper
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import COMPLETE_MARK
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import DeadlineExceeded, InfrastructureFailure
from prime_hpc.launchers.slurm.allocation import MAIN, Job, jobs
from prime_hpc.launchers.slurm.steps import step_command, step_environment
from prime_hpc.plan.run_plan import RunPlan, load

POLL_S = 0.5
LEAVE_S = 30.0
EXIT_INTERRUPTED = 130

Steps = dict[str, subprocess.Popen]


def run_job(plan: RunPlan, job: Job) -> int:
    """Run every unit of `job` in the allocation around this process. Returns an exit code."""
    config, paths = plan.typed_config(), RunPaths(Path(plan.run_dir))
    _refuse_requeued(paths)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _interrupt)
    with _lease(plan, config, paths) if job.name == MAIN else _lease_of_another(plan, config, paths):
        steps: Steps = {}
        try:
            for unit in job.units(plan):
                steps[unit.name] = subprocess.Popen(step_command(plan, unit), env=step_environment(os.environ))
            failed = _watch(steps, paths)
        except KeyboardInterrupt:
            _say("told to stop")
            return EXIT_INTERRUPTED
        finally:
            _stop(steps, config.launcher.stop_grace_s)
    _say(f"{failed} failed first" if failed else "complete")
    return 1 if failed else 0


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


def _refuse_requeued(paths: RunPaths) -> None:
    """A plan is for one attempt: what it left behind would mix with what it does again."""
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        raise InfrastructureFailure(f"Slurm has started this job again; go on with {paths.root.name} as a new attempt: "
                                    f"launch it with run.name={paths.root.name} resume=latest")  # fmt: skip


def _watch(steps: Steps, paths: RunPaths) -> str | None:
    """Returns the unit that failed first, or None once the run is complete and every step has ended."""
    complete_since = None
    while True:
        codes = {name: step.poll() for name, step in steps.items()}
        if complete_since is None and COMPLETE_MARK in list_fresh(paths.rendezvous):
            complete_since = time.monotonic()
        failed = next((name for name, code in codes.items() if code), None)
        if failed and complete_since is None:
            return failed
        if None not in codes.values():
            return None if complete_since else next(iter(codes))
        if complete_since and time.monotonic() - complete_since > LEAVE_S:
            return None
        time.sleep(POLL_S)


def _stop(steps: Steps, grace_s: float) -> None:
    """SIGTERM to the tasks of all steps, and after `grace_s` seconds an end to them."""
    if any(step.poll() is None for step in steps.values()):
        subprocess.run(["scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"]])
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(step.poll() is None for step in steps.values()):
        time.sleep(POLL_S)
    for step in steps.values():
        step.terminate()
    for step in steps.values():
        step.wait()


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--job", default=MAIN)
    arguments = parser.parse_args()
    plan = load(arguments.plan)
    try:
        sys.exit(run_job(plan, next(job for job in jobs(plan) if job.name == arguments.job)))
    except InfrastructureFailure as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
