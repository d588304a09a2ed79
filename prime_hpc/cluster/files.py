"""Files on a shared filesystem: whole or absent, and seen despite attribute caches."""

import json
import os
import time
import uuid
from io import FileIO
from pathlib import Path
from typing import Any

POLL_S = 0.1


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` beside `path` and rename it into place; `durable` flushes it to disk first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append(file: FileIO, data: bytes) -> None:
    """Add `data` to the end of an unbuffered `file`, wholly or, where that fails, not at all."""
    end, left = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """`value` as JSON, whole or absent."""
    write_atomic(path, json.dumps(value, indent=1).encode(), durable=durable)


def read_json(path: Path) -> Any | None:
    """The JSON in `path`, or None where there is no such file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def appears(path: Path, timeout_s: float) -> bool:
    """Whether `path`, of which another process has spoken, is there within `timeout_s` seconds.

    A client of NFS or Lustre may see a new name later than the one that made it.
    """
    deadline = time.monotonic() + timeout_s
    while path.name not in list_fresh(path.parent):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def list_fresh(directory: Path) -> list[str]:
    """Names in `directory`. Opening it anew makes an NFS or Lustre client ask the server; absent means empty."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return []
    try:
        return os.listdir(handle)
    finally:
        os.close(handle)
