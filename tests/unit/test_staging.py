"""Models on a node's own disk: one process copies, the others wait; what is stale, cut short or false is not loaded."""

import multiprocessing
import os
import shutil
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from prime_hpc.cluster import staging
from prime_hpc.cluster.staging import LOCK, MARK, stage
from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.schema import parse
from prime_hpc.errors import ConfigProblem, ConfigurationError, CorruptData, DeadlineExceeded, InfrastructureFailure


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "weights.bin"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    return "$NODE_DISK"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (MARK, LOCK)}


def test_what_loads_a_model_is_copied_once_a_start(model: Path, scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stage(model, scratch, "first", 5)
    assert contents(folder) == {name: (model / name).read_bytes() for name in ("config.json", "model.safetensors")}
    inode = (folder / "model.safetensors").stat().st_ino
    # within a start the source is not looked at again; the next start takes over what has changed
    (model / "config.json").write_bytes(b"{}")
    assert contents(stage(model, scratch, "first", 5))["config.json"] != b"{}"
    assert contents(stage(model, scratch, "second", 5))["config.json"] == b"{}"
    assert (folder / "model.safetensors").stat().st_ino == inode


def stage_and_tell(model: Path, scratch: str, copies: SimpleQueue, folders: SimpleQueue) -> None:
    copy = staging._copy
    staging._copy = lambda source, target: (copies.put(source.name), copy(source, target))[1]
    folders.put(str(stage(model, scratch, "start", 120)))


def test_processes_of_a_node_copy_a_model_once_between_them(model: Path, scratch: str) -> None:
    forks = multiprocessing.get_context("fork")
    copies, folders = forks.SimpleQueue(), forks.SimpleQueue()
    processes = [forks.Process(target=stage_and_tell, args=(model, scratch, copies, folders)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len({folders.get() for _ in processes}) == 1
    assert sorted(copies.get() for _ in range(2)) == ["config.json", "model.safetensors"]
    assert copies.empty()


def test_a_copy_that_was_cut_short_is_made_again(model: Path, scratch: str) -> None:
    folder = stage(model, scratch, "start", 5)
    (folder / MARK).unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    assert (
        contents(stage(model, scratch, "start", 5))["model.safetensors"] == (model / "model.safetensors").read_bytes()
    )


def test_a_disk_that_gives_back_something_else_is_found(
    model: Path, scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(fd: int, *_: int) -> None:
        os.pwrite(fd, b"X", 3)

    monkeypatch.setattr(staging.os, "posix_fadvise", flip)
    with pytest.raises(CorruptData, match="is not what was read from .*config.json: leave that node out"):
        stage(model, scratch, "start", 5)


def test_a_copier_that_hangs_a_full_disk_and_a_wrong_folder_are_named(
    model: Path, scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stage(model, scratch, "start", 5)
    with staging._alone(folder) as mine:
        assert mine
        with pytest.raises(DeadlineExceeded, match="the process of this node that copies it"):
            stage(model, scratch, "other", 0)
    shutil.rmtree(folder)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(InfrastructureFailure, match="0.0 GiB free and the model needs 0.0"):
        stage(model, scratch, "start", 5)
    with pytest.raises(
        ConfigurationError, match=r"cluster.scratch = '\$NOWHERE': expected a folder that exists on every"
    ):
        stage(model, "$NOWHERE", "start", 5)
    expected = "an absolute folder, or a variable that holds one as in $TMPDIR"
    relative = find_conflicts(parse({"cluster": {"scratch": "scratch"}}))
    assert ConfigProblem("cluster.scratch", "scratch", expected) in relative
