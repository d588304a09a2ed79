"""Stopping processes: whole groups, grandchildren included, and no shared memory left."""

import os
import sys
import time
from pathlib import Path

import psutil

from prime_hpc.launchers.children import Child, spawn, stop
from prime_hpc.plan.run_plan import ProcessPlan

STUBBORN = """
import multiprocessing.shared_memory as m, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = m.SharedMemory(create=True, size=64)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print(memory.name, child.pid, flush=True)
time.sleep(600)
"""
ORPHANING = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
"""


def start(tmp_path: Path, code: str) -> Child:
    log = tmp_path / "process.log"
    return spawn(ProcessPlan(name="p", component="trainer", index=0, node=0, command=[sys.executable, "-c", code],
                             log=str(log)), gpus_on_node=0)  # fmt: skip


def first_line(child: Child) -> str:
    deadline = time.monotonic() + 120
    while not child.last_lines(1) and time.monotonic() < deadline:
        time.sleep(0.05)
    return child.last_lines(1)


def test_a_stubborn_process_its_child_and_its_shared_memory_are_gone(tmp_path: Path) -> None:
    child = start(tmp_path, STUBBORN)
    memory, grandchild = first_line(child).split()
    assert os.path.exists(f"/dev/shm/{memory}")
    stop([child], grace_s=0.5)
    assert child.exit_code is not None
    assert not psutil.pid_exists(int(grandchild)) or psutil.Process(int(grandchild)).status() == psutil.STATUS_ZOMBIE
    assert not os.path.exists(f"/dev/shm/{memory}")


def test_a_grandchild_whose_parent_has_left_is_stopped_too(tmp_path: Path) -> None:
    child = start(tmp_path, ORPHANING)
    grandchild = int(first_line(child))
    child.process.wait(10)
    stop([child], grace_s=5)
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
