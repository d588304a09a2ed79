"""Runs a plan as processes of this machine, under the supervisor."""

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_hpc.cluster.gpus import count_gpus
from prime_hpc.cluster.lease import LeaseKeeper
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.run import RunConfig
from prime_hpc.launchers import credentials
from prime_hpc.launchers.children import Child, spawn, stop
from prime_hpc.launchers.claims import give_back
from prime_hpc.launchers.supervisor import Ending, Running, Supervisor
from prime_hpc.launchers.verdict import verdict
from prime_hpc.launchers.view import open_view
from prime_hpc.plan.run_plan import RunPlan
from prime_hpc.plan.units import Unit, units


class LocalUnit:
    """The processes of a unit."""

    def __init__(self, children: list[Child]):
        self.children = {child.name: child for child in children}

    def exits(self) -> dict[str, int | None]:
        return {name: child.exit_code for name, child in self.children.items()}

    def dump(self, process: str) -> None:
        pid = self.children[process].process.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
            os.kill(pid, signal.SIGCONT)

    def last_words(self, process: str) -> str:
        return f"the end of {self.children[process].log}:\n\n{self.children[process].last_lines()}"


class LocalStarter:
    """Starts the processes of a unit here, each in a session of its own."""

    def __init__(self) -> None:
        self._gpus = count_gpus()

    def start(self, unit: Unit, restart: int) -> LocalUnit:
        return LocalUnit([spawn(process, self._gpus, restart) for process in unit.processes])

    def stop(self, running: list[Running], grace_s: float) -> None:
        stop([child for unit in running for child in unit.children.values()], grace_s)


def run_local(plan: RunPlan, config: RunConfig) -> int:
    """Start every process of the plan, watch until the run is complete, stop them all. Returns an exit code."""
    paths = RunPaths(Path(plan.run_dir))
    credentials.provide(config, paths.root)
    lease = LeaseKeeper(paths.rendezvous, plan.attempt, config.cluster.lease_s)
    interrupted = None
    with _termination_as_interrupt(), open_view(plan, config.launcher.live) as view:
        supervisor = Supervisor(plan, config, paths, LocalStarter(), view, units=units(plan))
        try:
            ending = supervisor.run()
        except KeyboardInterrupt as interrupt:
            interrupted = f"interrupted by {str(interrupt) or 'Ctrl-C'}"
            view.say(f"{interrupted}, stopping every process")
            ending = Ending("stopped", words=interrupted)
        finally:
            supervisor.stop(interrupted)
            lease.close()
            give_back(config, paths)
            credentials.discard(config, paths.root)
    return verdict(ending, paths, view)  # below a live table, where it is the last line


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
