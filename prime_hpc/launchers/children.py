"""Child processes in process groups of their own, and how they are stopped without leaving anything behind."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from prime_hpc.cluster.gpus import visible_devices
from prime_hpc.cluster.role import RESTART_VARIABLE
from prime_hpc.plan.run_plan import ProcessPlan

TRACKER_GRACE_S = 2.0
PR_SET_PDEATHSIG = 1
"""prctl(2)"""


@dataclass
class Child:
    """A started process of the plan."""

    plan: ProcessPlan
    process: subprocess.Popen
    log: Path

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def last_lines(self, count: int = 20) -> str:
        """The end of its log."""
        return last_lines(self.log, count)

    def group(self) -> list[psutil.Process]:
        """Every live process of its session, itself included, even those whose parent is gone."""
        return [p for p in psutil.process_iter() if _session(p) == self.process.pid and p.is_running() and not _dead(p)]


def spawn(plan: ProcessPlan, gpus_on_node: int, restart: int = 0, *, dies_with_parent: bool = False) -> Child:
    """Start a process of the plan, its output going to its log; every further start has a log of its own.

    `dies_with_parent` has the kernel kill it when this process dies, where nobody else would find it.
    """
    env = {**os.environ, **plan.env, "PYTHONPATH": _import_path(), RESTART_VARIABLE: str(restart)}
    if gpus_on_node:
        env["CUDA_VISIBLE_DEVICES"] = visible_devices(plan.gpus)
    path = Path(log_file(plan, restart))
    with path.open("ab") as log:
        process = subprocess.Popen(plan.command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   start_new_session=True,
                                   preexec_fn=_die_with_parent if dies_with_parent else None)  # fmt: skip
    return Child(plan, process, path)


def last_lines(log: Path, count: int = 20) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def log_file(plan: ProcessPlan, restart: int) -> str:
    """`PROCESS.log`, after a restart `PROCESS.restart_1.log` and so on."""
    path = Path(plan.log)
    return str(path.with_name(f"{path.stem}.restart_{restart}{path.suffix}")) if restart else plan.log


def stop(children: list[Child], grace_s: float) -> None:
    """SIGTERM to every group, SIGKILL to what is left after `grace_s` seconds.

    The resource trackers of multiprocessing go last: once their clients are dead they remove shared memory.
    """
    for child in children:
        _signal(child.group(), signal.SIGTERM, spare_trackers=True)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(child.group() for child in children):
        time.sleep(0.1)
    left = [p for child in children for p in child.group()]
    _signal(left, signal.SIGKILL, spare_trackers=True)
    psutil.wait_procs(left, timeout=TRACKER_GRACE_S)
    for child in children:
        _signal(child.group(), signal.SIGKILL, spare_trackers=False)
        child.process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(processes: list[psutil.Process], signum: int, *, spare_trackers: bool) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not (spare_trackers and "resource_tracker" in " ".join(process.cmdline())):
                process.send_signal(signum)


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None


def _dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _import_path() -> str:
    """The folder a module was started from stays importable in the children, so that engines and environments of the
    user's own folder load as they did in the launcher."""
    return os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
