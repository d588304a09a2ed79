"""What submitit runs in every task of a step: the process of the plan that this task stands for."""

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmJobEnvironment

from prime_hpc.cluster import control
from prime_hpc.cluster.files import read_json, write_json
from prime_hpc.cluster.lease import FILE as LEASE
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.rendezvous import STEP_VARIABLE
from prime_hpc.cluster.role import RESTART_VARIABLE, UNIT_VARIABLE
from prime_hpc.cluster.stopping import StoppingMarks
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.launchers.children import Child, spawn
from prime_hpc.launchers.slurm.allocation import MAIN, job_of
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan, load
from prime_hpc.plan.units import Unit, units

FORWARDED = (signal.SIGINT, signal.SIGUSR2, signal.SIGCONT)


@dataclass(frozen=True)
class RoleTask:
    """Runs one process of the plan at `plan_path`: the one whose place in its unit is this task's rank."""

    plan_path: Path

    def __call__(self) -> dict[str, Any]:
        """Start the process, hand signals on to it, and return once it has ended well.

        Raises:
            InfrastructureFailure: it failed; the text has its own error and where its log lies.
        """
        plan = load(self.plan_path)
        paths, restart = RunPaths(Path(plan.run_dir)), int(os.environ.get(RESTART_VARIABLE, "0"))
        unit, process = find_process(plan, os.environ)
        SlurmJobEnvironment().paths.result_pickle.unlink(missing_ok=True)  # of this task before its unit was restarted
        os.environ[STEP_VARIABLE] = step_id(plan, unit, os.environ)
        child = spawn(process, plan.group(process).gpus, restart, dies_with_parent=True)
        _forward_signals(child, unit, paths, plan.attempt, drains=job_of(plan, unit).name == MAIN)
        code = child.process.wait()
        write_json(paths.exits / f"{process.name}.json", {"exit_code": code, "time": time.time()})
        if code:
            raise InfrastructureFailure(_describe(plan, process, code))
        return {"process": process.name, "host": socket.gethostname(), "log": str(child.log)}


def find_process(plan: RunPlan, environment: Mapping[str, str]) -> tuple[Unit, ProcessPlan]:
    """The unit and the process of this task."""
    unit = next(unit for unit in units(plan) if unit.name == environment[UNIT_VARIABLE])
    return unit, unit.processes[int(environment["SLURM_PROCID"])]


def step_id(plan: RunPlan, unit: Unit, environment: Mapping[str, str]) -> str:
    """This step as scancel finds it: the id of the component, which Slurm gives no task as its own, and of the step."""
    number = job_of(plan, unit).block_number(unit.group)
    component = environment.get(f"SLURM_JOB_ID_HET_GROUP_{number}", environment["SLURM_JOB_ID"])
    return f"{component}.{environment['SLURM_STEP_ID']}"


def _forward_signals(child: Child, unit: Unit, paths: RunPaths, attempt: int, *, drains: bool) -> None:
    """In place of submitit's own handlers, which would requeue the job from inside a task.

    A SIGTERM that Slurm sends to the job (preemption, the time limit) becomes a request to drain, which leaves time to
    save. One that it sends since another task of the step has failed does not, nor one after a newer attempt has taken
    over, which would drain that one; nor does one to a linked job (not `drains`), whose engines work until they are
    killed, and may come back.
    """

    def end(number: int, _: object) -> None:
        failed = any((read_json(paths.exits / f"{p.name}.json") or {}).get("exit_code") for p in unit.processes)
        superseded = (read_json(paths.rendezvous / LEASE) or {"attempt": attempt})["attempt"] > attempt
        if failed or superseded or StoppingMarks(paths).stands(unit.name):
            child.process.send_signal(number)
        elif drains:
            control.ask(paths.control, "drain", "Slurm is about to end the job", by=child.name, goes_on=True)

    signal.signal(signal.SIGTERM, end)
    for number in FORWARDED:
        signal.signal(number, lambda received, _: child.process.send_signal(received))


def _describe(plan: RunPlan, process: ProcessPlan, code: int) -> str:
    record = read_json(RunPaths(Path(plan.run_dir)).rendezvous / f"{process.name}.json") or {}
    ours = record.get("attempt") == plan.attempt and record.get("error")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{process.name} {how} on {socket.gethostname()}{f': {ours}' if ours else ''}; see {process.log}"
