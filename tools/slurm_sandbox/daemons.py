"""Daemons of a sandbox: started in the foreground in sessions of their own, known by pid and start time, so that no
process of anybody else is ever signalled."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

import psutil

from prime_hpc.cluster.files import read_json, write_json
from prime_hpc.errors import DeadlineExceeded, InfrastructureFailure
from tools.slurm_sandbox.layout import Layout
from tools.slurm_sandbox.packages import search_path
from tools.slurm_sandbox.waiting import wait_for

START_S = 60.0
STOP_S = 10.0
SAME_START_S = 2.0
LOG_LINES = 10
SLURM_PREFIXES = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SCANCEL")


def variables(layout: Layout) -> dict[str, str]:
    """What leads Slurm's commands, and the tasks of jobs, to this sandbox."""
    return {"SLURM_CONF": str(layout.conf), "PATH": search_path()}


def environment(layout: Layout) -> dict[str, str]:
    """The caller's environment without what an outer Slurm job left in it, and with `variables`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(SLURM_PREFIXES)}
    return {**inherited, **variables(layout)}


def start(layout: Layout, name: str, command: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
    """Start a daemon, `extra` being added to its environment, and note its identity."""
    env = {**environment(layout), **(extra or {})}
    with open(layout.early_log(name), "wb") as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   cwd=layout.directory, start_new_session=True)  # fmt: skip
    write_json(layout.pid_file(name), {"pid": process.pid, "created": psutil.Process(process.pid).create_time()})


def find(layout: Layout, name: str) -> psutil.Process | None:
    """The daemon's process while it lives."""
    record = read_json(layout.pid_file(name))
    if record is None or not psutil.pid_exists(record["pid"]):
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(record["pid"])
        # The clock may have been set since: start times are seconds since boot, added to the time of boot.
        if abs(process.create_time() - record["created"]) < SAME_START_S and _lives(process):
            return process
    return None


def stop(layout: Layout, *names: str) -> None:
    """SIGTERM to the daemons at once, SIGKILL to those that take longer than 10 s."""
    processes = [process for name in names if (process := find(layout, name))]
    _signal(processes, signal.SIGTERM)
    with contextlib.suppress(DeadlineExceeded):
        _wait_for_end(processes)
    kill(processes)


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    _signal(processes, signal.SIGKILL)
    _wait_for_end(processes)


def job_processes(layout: Layout, node: str | None = None) -> list[psutil.Process]:
    """Tasks and step managers of the sandbox's jobs, of one node or of all. A killed slurmd leaves them running."""
    nodes = [node] if node else layout.names
    logs = {str(layout.log(f"slurmd-{name}")) for name in nodes}
    processes = psutil.process_iter()
    return [p for p in processes if _is_task(p, str(layout.conf), nodes) or _is_step_manager(p, logs)]


def wait_until(layout: Layout, daemon: str, wanted: str, condition: Callable[[], bool]) -> None:
    """Wait for `condition` while `daemon` lives.

    Raises:
        InfrastructureFailure: the daemon died.
        DeadlineExceeded: `wanted` did not come within 60 s.
    """

    def ready() -> bool:
        if find(layout, daemon) is None:
            raise InfrastructureFailure(f"{daemon} ended; its last words:\n{last_words(layout, daemon)}")
        return condition()

    wait_for(ready, wanted, f"{daemon}, {layout.log(daemon)}", START_S)


def last_words(layout: Layout, daemon: str) -> str:
    """The end of the daemon's log, or what it said before it had one."""
    paths = [path for path in (layout.log(daemon), layout.early_log(daemon)) if path.exists()]
    lines = [line for path in paths for line in path.read_text(errors="replace").splitlines()[-LOG_LINES:]]
    return "\n".join(lines)


def _signal(processes: Sequence[psutil.Process], signum: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def _wait_for_end(processes: Sequence[psutil.Process]) -> None:
    names = ", ".join(str(process.pid) for process in processes)
    wait_for(lambda: not any(map(_lives, processes)), f"the end of processes {names}", "the kernel", STOP_S)


def _lives(process: psutil.Process) -> bool:
    """A zombie is dead, however late the first process of a container reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_task(process: psutil.Process, conf: str, nodes: Sequence[str]) -> bool:
    """Slurm tells tasks and batch scripts their node, and slurmd which configuration it follows."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        env = process.environ()
        return env.get("SLURM_CONF") == conf and env.get("SLURMD_NODENAME") in nodes
    return False


def _is_step_manager(process: psutil.Process, logs: set[str]) -> bool:
    """They overwrite their environment with their title, but write to their slurmd's log."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.name() == "slurmstepd" and any(file.path in logs for file in process.open_files())
    return False
