"""Models on a node's own disk: copied once by whichever process of the node comes first, checked, and read by all."""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from blake3 import blake3

from prime_hpc.cluster.files import write_atomic
from prime_hpc.errors import ConfigProblem, ConfigurationError, CorruptData, DeadlineExceeded, InfrastructureFailure

MARK = "staged.json"
LOCK = "lock"
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
"""What of a model's folder is needed to load it."""
BLOCK_BYTES = 16 * 2**20
POLL_S = 0.2
GIB = 2**30


class StagedFile(msgspec.Struct, frozen=True):
    """A copied file: bytes and time of change of its source, and the blake3 digest of both."""

    size: int
    changed_ns: int
    digest: str


class Staged(msgspec.Struct, frozen=True):
    """A copy that is whole. `start` is the start of a run that last compared it with its source."""

    start: str
    files: dict[str, StagedFile]


def stage(source: Path, scratch: str, start: str, timeout_s: float) -> Path:
    """The copy of the model in `source` on this node's disk.

    One process of the node lists and reads the source, once for every `start`; the others wait for its mark, on the
    node's own disk, for `timeout_s` seconds at most.

    Raises:
        DeadlineExceeded: the copy did not become whole in time.
        CorruptData: what was written is not what was read.
    """
    folder = _own_folder(scratch) / f"{source.name}-{blake3(str(source.resolve()).encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    while not _is_settled(folder, start):
        with _alone(folder) as mine:
            if mine and not _is_settled(folder, start):
                _settle(source, folder, start)
        if not mine and time.monotonic() > deadline:
            raise DeadlineExceeded(f"a process on {socket.gethostname()}", f"{source} in {folder}",
                                   "the process of this node that copies it", timeout_s)  # fmt: skip
        time.sleep(0 if mine else POLL_S)
    return folder


def _own_folder(scratch: str) -> Path:
    """This user's folder below `scratch`, whose variables are those of the node."""
    root = Path(os.path.expandvars(scratch))
    if not root.is_dir():
        expected = f"a folder that exists on every node; on {socket.gethostname()} there is no {root}"
        raise ConfigurationError([ConfigProblem("cluster.scratch", scratch, expected)])
    folder = root / f"prime_hpc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise InfrastructureFailure(f"{folder} on {socket.gethostname()} belongs to another user: remove it, or choose "
                                    "another cluster.scratch")  # fmt: skip
    return folder


def _is_settled(folder: Path, start: str) -> bool:
    staged = _read_mark(folder)
    return staged is not None and staged.start == start


def _read_mark(folder: Path) -> Staged | None:
    try:
        return msgspec.json.decode((folder / MARK).read_bytes(), type=Staged)
    except FileNotFoundError:
        return None


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether this process is the one that copies. The kernel frees the lock of a process that dies."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _settle(source: Path, folder: Path, start: str) -> None:
    """Copy what has changed in the source since the last mark, and everything where there is none."""
    before = staged.files if (staged := _read_mark(folder)) else {}
    (folder / MARK).unlink(missing_ok=True)
    wanted = {path.name: path.stat() for pattern in MODEL_FILES for path in sorted(source.glob(pattern))}
    kept = {
        name: before[name]
        for name, facts in wanted.items()
        if name in before and (before[name].size, before[name].changed_ns) == (facts.st_size, facts.st_mtime_ns)
    }
    missing = [name for name in wanted if name not in kept]
    _make_room(folder, sum(wanted[name].st_size for name in missing))
    copied = {name: StagedFile(wanted[name].st_size, wanted[name].st_mtime_ns, _copy(source / name, folder / name))
              for name in missing}  # fmt: skip
    write_atomic(folder / MARK, msgspec.json.encode(Staged(start, kept | copied)))


def _make_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InfrastructureFailure(
            f"{folder} on {socket.gethostname()} has {free / GIB:.1f} GiB free and the model needs {needed / GIB:.1f}: "
            "remove what others left there, choose another cluster.scratch, or leave it out")  # fmt: skip


def _copy(source: Path, target: Path) -> str:
    """Copy a file and read the copy again, past the page cache; returns the digest."""
    partial, digest = target.with_name(f".{target.name}.partial"), blake3()
    with source.open("rb") as origin, partial.open("wb") as copy:
        while block := origin.read(BLOCK_BYTES):
            digest.update(block)
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
        os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _digest(partial) != digest.hexdigest():
        raise CorruptData(f"{partial} on {socket.gethostname()} is not what was read from {source}: leave that node "
                          "out (cluster.directives.exclude), its disk or memory is failing")  # fmt: skip
    partial.rename(target)
    return digest.hexdigest()


def _digest(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
