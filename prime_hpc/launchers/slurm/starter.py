"""Restart units as job steps: one srun each, from the batch script's process."""

import os
import signal
import subprocess
import time
from pathlib import Path

from prime_hpc.cluster.files import read_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import RESTART_VARIABLE
from prime_hpc.cluster.stopping import StoppingMarks
from prime_hpc.launchers.children import last_lines, log_file
from prime_hpc.launchers.slurm.hosts import Hosts
from prime_hpc.launchers.slurm.steps import step_command, step_environment
from prime_hpc.launchers.supervisor import Running
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.units import Unit

POLL_S = 0.2
SRUN_LEAVES_S = 20.0
"""An srun that was told to end its step has this long before it is killed."""


class StepUnit:
    """A unit that runs as a step."""

    def __init__(self, plan: RunPlan, unit: Unit, restart: int, srun: subprocess.Popen):
        self.unit, self.srun = unit, srun
        self._paths = RunPaths(Path(plan.run_dir))
        self._restart = restart

    def exits(self) -> dict[str, int | None]:
        """While the step runs, or has ended well, every process does; of a failed one only the first to end has failed.

        Slurm ends the others when one has failed, and srun knows no more than the highest exit code.
        """
        code = self.srun.poll()
        codes: dict[str, int | None] = {process.name: code for process in self.unit.processes}
        if code in (None, 0):
            return codes
        ends = {name: end for name in codes if (end := self._end(name)) and end["exit_code"]}
        first = min(ends, key=lambda name: ends[name]["time"], default=next(iter(codes)))
        failed = ends[first]["exit_code"] if ends else code
        return {name: failed if name == first else None for name in codes}

    def dump(self, process: str) -> None:
        step = (read_json(self._paths.rendezvous / f"{process}.json") or {}).get("step_id")
        if step:
            for name in ("USR2", "CONT"):
                subprocess.run(["scancel", f"--signal={name}", step], capture_output=True)

    def last_words(self, process: str) -> str:
        plan = next(p for p in self.unit.processes if p.name == process)
        log = Path(log_file(plan, self._restart))
        return f"the end of {log}:\n\n{last_lines(log) if log.exists() else 'it never started'}"

    def _end(self, process: str) -> dict | None:
        return read_json(self._paths.exits / f"{process}.json")


class StepStarter:
    """Starts steps in the job around this process."""

    def __init__(self, plan: RunPlan, hosts: Hosts):
        self._plan, self._hosts = plan, hosts
        self._paths = RunPaths(Path(plan.run_dir))
        self._marks = StoppingMarks(self._paths)

    def start(self, unit: Unit, restart: int) -> StepUnit:
        """Start the step of a unit, again only on nodes that are still there and fit.

        Raises:
            NodesLost: they are not, and no spare is left.
        """
        if restart:
            self._hosts.settle([unit])
        self._marks.lift(unit.name)
        for process in unit.processes:
            (self._paths.exits / f"{process.name}.json").unlink(missing_ok=True)
        environment = {**step_environment(os.environ), RESTART_VARIABLE: str(restart)}
        output = self._paths.logs(self._plan.attempt) / f"{unit.name}.srun.log"
        command = step_command(self._plan, unit, self._hosts.of(unit))
        with output.open("ab") as log:
            srun = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        return StepUnit(self._plan, unit, restart, srun)

    def stop(self, running: list[Running], grace_s: float) -> None:
        """Tasks are told first; srun itself kills what it is told to end. The marks tell tasks who asks."""
        units = [unit for unit in running if isinstance(unit, StepUnit)]
        for unit in units:
            self._marks.set(unit.unit.name)
        if grace_s and any(unit.srun.poll() is None for unit in units):
            subprocess.run(["scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"]], capture_output=True)
            _wait(units, grace_s)
        for unit in units:
            if unit.srun.poll() is None:
                unit.srun.send_signal(signal.SIGTERM)
        _wait(units, SRUN_LEAVES_S)
        for unit in units:
            unit.srun.kill()
            unit.srun.wait()


def _wait(units: list[StepUnit], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(unit.srun.poll() is None for unit in units):
        time.sleep(POLL_S)
