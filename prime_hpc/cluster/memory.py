"""Memory of this machine and what the kernel's out-of-memory killer did to the processes beside this one."""

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

CGROUPS = Path("/sys/fs/cgroup")


class HostMemory(msgspec.Struct, frozen=True):
    """A machine's memory in bytes, and the kills counted in the cgroup of the process that asks; None: no counter."""

    host: str
    total: int
    oom_kills: int | None = None


def host_memory() -> HostMemory:
    """Of this machine, now."""
    return HostMemory(socket.gethostname(), psutil.virtual_memory().total, oom_kills())


def oom_kills(own_cgroups: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> int | None:
    """Kills by the out-of-memory killer since this process's cgroup was made, of version 2 or 1; None: not counted."""
    counts = (_count(path) for path in _counters(own_cgroups.read_text(), root) if path.is_file())
    return next((count for count in counts if count is not None), None)


def _counters(own_cgroups: str, root: Path) -> Iterator[Path]:
    """Where the count may be. Inside a container the cgroup's own path may not be visible, its root is."""
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            name = "memory.oom_control" if controllers else "memory.events"
            yield root / controllers / path.lstrip("/") / name
            yield root / controllers / name


def _count(path: Path) -> int | None:
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill ")), None)
