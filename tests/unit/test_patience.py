"""A full disk: writes wait for space, say so, and leave nothing half written."""

import errno
import logging
from io import FileIO
from pathlib import Path

import pytest

from prime_hpc.cluster import patience as module
from prime_hpc.cluster.beats import Heart
from prime_hpc.cluster.files import append
from prime_hpc.cluster.patience import Patience
from prime_hpc.errors import InfrastructureFailure

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heart:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    return Heart(tmp_path, "trainer-0", 1, 0, 1.0)


def failing(times: int, error: OSError) -> tuple[list[int], object]:
    tries: list[int] = []

    def write() -> str:
        tries.append(1)
        if len(tries) <= times:
            raise error
        return "written"

    return tries, write


def test_a_write_waits_for_space(heart: Heart, caplog: pytest.LogCaptureFixture) -> None:
    tries, write = failing(2, FULL)
    assert Patience(30.0, heart, logging.getLogger("t")).write("v0.3", write) == "written"
    assert len(tries) == 3
    assert "v0.3 cannot be written" in caplog.text and "free space" in caplog.text


def test_a_disk_that_stays_full_ends_the_wait(heart: Heart) -> None:
    _, write = failing(10**9, FULL)
    with pytest.raises(InfrastructureFailure, match="v0.3 could not be written for 0 s.*free space, then resume"):
        Patience(0.05, heart, logging.getLogger("t")).write("v0.3", write)


def test_another_error_is_not_waited_for(heart: Heart) -> None:
    tries, write = failing(1, OSError(errno.EROFS, "Read-only file system"))
    with pytest.raises(OSError, match="Read-only"):
        Patience(30.0, heart, logging.getLogger("t")).write("v0.3", write)
    assert len(tries) == 1


class Tight(FileIO):
    """A file whose disk is full after `room` bytes."""

    room = 0

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise FULL
        taken = min(self.room, len(data))
        self.room -= taken
        return super().write(data[:taken])


def test_an_append_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"one,")
    with Tight(path, "ab") as file:
        file.room = 2
        with pytest.raises(OSError, match="No space"):
            append(file, b"two,")
        assert path.read_bytes() == b"one,"
        file.room = 100
        append(file, b"two,")
    assert path.read_bytes() == b"one,two,"
