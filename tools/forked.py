"""Launches a run on this machine whose processes are forked from one that has loaded the libraries already.

`python -m tools.forked` takes the arguments of `python -m prime_hpc.launch`. A process is back in a second rather than
in ten, so that hundreds of restarts can be tried in a few minutes. Not for GPUs, nor for the engines of vLLM.
"""

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from prime_hpc import launch
from prime_hpc.cluster.role import RESTART_VARIABLE
from prime_hpc.launchers import local
from prime_hpc.launchers.children import Child, log_file
from prime_hpc.plan.run_plan import ProcessPlan
from prime_hpc.plan.units import Unit

REPOSITORY = Path(__file__).resolve().parents[1]
POLL_S = 0.005


class Forked:
    """A forked process with the face of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess):
        self.pid = process.pid
        self._process = process

    def poll(self) -> int | None:
        """Exit code; 0 where somebody else has waited for it, so that nobody knows any more."""
        code = self._process.exitcode
        return 0 if code is None and not psutil.pid_exists(self.pid) else code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen | Forked
Start = Callable[[list[str], dict[str, str], Path], Process]
"""Starts a command with an environment, in a session of its own; what it says is added to a file."""


class ForkedStarter(local.LocalStarter):
    """Starts the processes of a unit as forks of the launcher, which has imported `tools.preloaded`.

    A library whose threads were at work in the launcher would stand still in them.
    """

    def start(self, unit: Unit, restart: int) -> local.LocalUnit:
        return local.LocalUnit([self._fork(process, restart) for process in unit.processes])

    def _fork(self, plan: ProcessPlan, restart: int) -> Child:
        log = Path(log_file(plan, restart))
        env = {**os.environ, **plan.env, RESTART_VARIABLE: str(restart)}
        process = multiprocessing.get_context("fork").Process(target=become, args=(plan.command, env, log))
        process.start()
        while process.is_alive() and os.getsid(process.pid) != process.pid:  # else it could not be found to be stopped
            time.sleep(POLL_S)
        return Child(plan, Forked(process), log)


def start_afresh(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
    """As a user does it."""
    with log.open("ab") as output:
        return subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=output, stderr=output, start_new_session=True)


def become(command: list[str], env: dict[str, str], log: Path) -> None:
    """Do in this process what `command`, `python -m MODULE ARGUMENTS`, would do in one of its own."""
    os.setsid()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(handle, stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    _, _, module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    importlib.import_module("tools.preloaded")
    local.LocalStarter = ForkedStarter
    launch.cli()
