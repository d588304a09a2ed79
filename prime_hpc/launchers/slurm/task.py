"""What submitit runs in every task of a step: the process of the plan that this task stands for."""

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from submitit.slurm.slurm import SlurmJobEnvironment

from prime_hpc.cluster.files import read_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.launchers.children import Child, spawn
from prime_hpc.launchers.slurm.steps import RESTART_VARIABLE, UNIT_VARIABLE
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan, load
from prime_hpc.plan.units import units

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


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
        process = find_process(plan, os.environ)
        SlurmJobEnvironment().paths.result_pickle.unlink(missing_ok=True)  # of this task before its unit was restarted
        child = spawn(process, plan.group(process).gpus)
        _forward_signals(child)
        code = child.process.wait()
        if code:
            raise InfrastructureFailure(_describe(plan, process, code))
        return {"process": process.name, "host": socket.gethostname(), "log": process.log}


def find_process(plan: RunPlan, environment: Mapping[str, str]) -> ProcessPlan:
    """The process of this task, its log being that of the unit's current restart."""
    unit = next(unit for unit in units(plan) if unit.name == environment[UNIT_VARIABLE])
    process = unit.processes[int(environment["SLURM_PROCID"])]
    return msgspec.structs.replace(process, log=log_file(process, int(environment.get(RESTART_VARIABLE, 0))))


def log_file(process: ProcessPlan, restart: int) -> str:
    """`PROCESS.log`, after a restart `PROCESS.restart_1.log` and so on."""
    path = Path(process.log)
    return str(path.with_name(f"{path.stem}.restart_{restart}{path.suffix}")) if restart else process.log


def _forward_signals(child: Child) -> None:
    """In place of submitit's own handlers, which would requeue the job from inside a task."""
    for number in FORWARDED:
        signal.signal(number, lambda received, _: child.process.send_signal(received))


def _describe(plan: RunPlan, process: ProcessPlan, code: int) -> str:
    record = read_json(RunPaths(Path(plan.run_dir)).rendezvous / f"{process.name}.json") or {}
    ours = record.get("attempt") == plan.attempt and record.get("error")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{process.name} {how} on {socket.gethostname()}{f': {ours}' if ours else ''}; see {process.log}"
