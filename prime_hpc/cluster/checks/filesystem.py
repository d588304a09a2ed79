"""How fast is a folder for one node, and is there room in it?"""

import os
import shutil
import time
from pathlib import Path

from prime_hpc.cluster.checks.finding import Finding

PROBE_BYTES = 256 * 2**20
BLOCK_BYTES = 8 * 2**20
GB = 1e9
GIB = 2**30


def inspect_speed(folder: Path, floor_gb_s: float, probe_bytes: int = PROBE_BYTES) -> Finding:
    """Write a file with a final flush, read it again past the page cache, and compare the slower with the floor."""
    path, block = folder / f".probe_{os.getpid()}_{os.uname().nodename}", os.urandom(BLOCK_BYTES)
    blocks = max(1, probe_bytes // BLOCK_BYTES)
    try:
        write_s, read_s = _write(path, block, blocks), _read(path)
    finally:
        path.unlink(missing_ok=True)
    written, read = (blocks * BLOCK_BYTES / GB / seconds for seconds in (write_s, read_s))
    words = f"{written:.2f} GB/s written, {read:.2f} GB/s read"
    fit = min(written, read) >= floor_gb_s
    return Finding("filesystem", fit, words if fit else f"{words}, at least {floor_gb_s:g} are needed in {folder}")


def inspect_room(folder: Path, free_gib: float) -> Finding:
    """Whether `folder` has so much space left."""
    free = shutil.disk_usage(folder).free / GIB
    if free >= free_gib:
        return Finding("room", True, f"{free:.0f} GiB free")
    return Finding("room", False, f"{free:.0f} of {free_gib:.0f} GiB free in {folder}")


def _write(path: Path, block: bytes, blocks: int) -> float:
    begin = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(blocks):
            file.write(block)
        os.fsync(file.fileno())
    return time.monotonic() - begin


def _read(path: Path) -> float:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.monotonic()
        while file.read(BLOCK_BYTES):
            pass
    return time.monotonic() - begin
