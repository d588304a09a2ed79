"""Commands under hard limits: nothing of them is left behind, however they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from prime_hpc.envs import confine

DEADLINE_S = 60.0
ESCAPED = "import os, time; os.fork() or (os.setsid(), os.fork() or (open('escaped', 'w').close(), time.sleep(600)))"
"""A grandchild in a session of its own, which nobody waits for."""


def confined(folder: Path, *command: str, seconds: float = DEADLINE_S, mebibytes: int = 512) -> subprocess.Popen:
    program = [sys.executable, "-I", confine.__file__, str(seconds), str(mebibytes), *command]
    return subprocess.Popen(program, cwd=folder, text=True, stdout=subprocess.PIPE, start_new_session=True)


def ended(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def workers_in(folder: Path) -> list[int]:
    """Processes whose working directory is `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process.pid)
        except psutil.Error:  # gone, or another user's
            continue
    return found


def wait_until(condition) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_output_and_status_are_the_commands(tmp_path: Path) -> None:
    assert ended(confined(tmp_path, "sh", "-c", "echo one; echo two >&2; exit 3")) == (3, "one\ntwo\n")
    assert ended(confined(tmp_path, "sh", "-c", "kill -9 $$")) == (137, "")
    assert ended(confined(tmp_path, "absent")) == (127, "\nabsent: No such file or directory\n")


def test_the_middle_of_a_long_output_is_left_out(tmp_path: Path) -> None:
    status, output = ended(confined(tmp_path, sys.executable, "-c", "print('a' * 50_000 + 'b' * 50_000, end='')"))
    half = confine.SHOWN_BYTES
    assert (status, output) == (0, f"{'a' * half}\n... {100_000 - 2 * half} bytes left out ...\n{'b' * half}")


def test_a_command_without_end_is_killed(tmp_path: Path) -> None:
    status, output = ended(confined(tmp_path, "sh", "-c", "echo begun; sleep 600", seconds=1))
    assert (status, output) == (confine.OUT_OF_TIME, "begun\n\nkilled: not over after 1 s\n")
    assert workers_in(tmp_path) == []


def test_memory_counts_over_all_processes(tmp_path: Path) -> None:
    code = "import os, time; os.fork(); held = b'x' * (40 * 2**20); time.sleep(600)"
    status, output = ended(confined(tmp_path, sys.executable, "-c", code, mebibytes=64))
    assert (status, output) == (confine.OUT_OF_MEMORY, "\nkilled: more than 64 MiB of memory\n")
    assert workers_in(tmp_path) == []


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    code = f"{ESCAPED}\nwhile not os.path.exists('escaped'): time.sleep(0.01)"
    assert ended(confined(tmp_path, sys.executable, "-c", code)) == (0, "")
    assert workers_in(tmp_path) == []


@pytest.mark.parametrize("group", [True, False])
def test_nothing_outlives_who_is_killed(tmp_path: Path, group: bool) -> None:
    process = confined(tmp_path, sys.executable, "-c", f"{ESCAPED}\ntime.sleep(600)", seconds=600)
    try:
        wait_until((tmp_path / "escaped").exists)
        assert len(workers_in(tmp_path)) >= 4
        os.killpg(process.pid, signal.SIGKILL) if group else process.kill()
        wait_until(lambda: workers_in(tmp_path) == [])
    finally:
        process.kill()
        process.communicate()
