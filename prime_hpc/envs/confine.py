"""Runs one command and leaves nothing of it behind: `python -I confine.py SECONDS MEBIBYTES COMMAND...`.

All processes that come of the command, those too that have left its session, are killed as soon as it ends, its time is
over, they hold more memory together than is allowed, or whoever started this is gone. Its output, errors included, is
printed at the end, without the middle where it is long. The exit status is the command's, or one of those below.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

import psutil

OUT_OF_TIME, OUT_OF_MEMORY, NOT_FOUND, GIVEN_UP = 124, 137, 127, 143
PERIOD_S = 0.2
"""Between looks at the memory."""
FILE_BYTES = 2**30
"""No file that the command writes, its output neither, gets longer."""
SHOWN_BYTES = 8192
"""Of each end of the output."""
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36
"""Options of prctl(2)."""


def main(arguments: list[str]) -> int:
    """Exit status of the command."""
    seconds, mebibytes, *command = arguments
    _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    caller = os.getpid()
    guard = os.fork()
    if guard:  # who started this kills it and its group; the guard is of another group and lives to clear up
        return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(GIVEN_UP))
    _prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
    _prctl(SET_SUBREAPER, 1)
    if os.getppid() != caller:
        return GIVEN_UP
    with tempfile.TemporaryFile() as output:
        try:
            status, verdict = _guarded(command, float(seconds), int(mebibytes), output)
        finally:
            _kill_all()
        _show(output, verdict)
    return status


def _guarded(command: list[str], seconds: float, mebibytes: int, output: IO[bytes]) -> tuple[int, str]:
    """Exit status of the command, and why it was killed, if it was."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    end = time.monotonic() + seconds
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    except OSError as error:
        return NOT_FOUND, f"{command[0]}: {error.strerror}"
    while time.monotonic() < end:
        try:
            status = process.wait(PERIOD_S)
            return (status if status >= 0 else 128 - status), ""
        except subprocess.TimeoutExpired:
            if _resident() > mebibytes * 2**20:
                return OUT_OF_MEMORY, f"killed: more than {mebibytes} MiB of memory"
    return OUT_OF_TIME, f"killed: not over after {seconds:g} s"


def _resident() -> int:
    """Bytes of memory that all descendants hold."""
    held = 0
    for process in psutil.Process().children(recursive=True):
        try:
            held += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return held


def _kill_all() -> None:
    """Orphans become children of this process, as it is their reaper: once it has none, nobody is left."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(psutil.Process().children(), timeout=PERIOD_S)


def _show(output: IO[bytes], verdict: str) -> None:
    length = output.seek(0, os.SEEK_END)
    output.seek(0)
    shown = output.read(2 * SHOWN_BYTES)
    if length > len(shown):
        output.seek(length - SHOWN_BYTES)
        left_out = f"\n... {length - 2 * SHOWN_BYTES} bytes left out ...\n".encode()
        shown = shown[:SHOWN_BYTES] + left_out + output.read()
    sys.stdout.buffer.write(shown + f"\n{verdict}\n".encode() if verdict else shown)
    sys.stdout.flush()


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
