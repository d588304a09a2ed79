"""Lustre, by a stand-in for its `lfs`; and a model fetched for nodes without a network."""

import os
import shutil
from pathlib import Path

import pytest

from prime_hpc.cluster.striping import spread
from tools import prefetch


def plant_lfs(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> Path:
    shim, said = folder / "lfs", folder / "said"
    shim.write_text(f'#!/bin/sh\necho "$@" >> {said}\nexit {code}\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return said


def test_files_lie_over_all_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = plant_lfs(tmp_path, monkeypatch, 0)
    assert spread(tmp_path / "weights")
    assert said.read_text() == f"setstripe --stripe-count -1 --stripe-size 16M {tmp_path}/weights\n"


def test_other_filesystems_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_lfs(tmp_path, monkeypatch, 1)
    assert not spread(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert not spread(tmp_path)


def test_a_fetched_model_must_be_whole(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = tmp_path / "model"

    def copy(name: str, local_dir: Path, **_: object) -> None:
        shutil.copytree(tiny_model, local_dir, dirs_exist_ok=True)

    monkeypatch.setattr(prefetch, "snapshot_download", copy)
    assert prefetch.main(["org/tiny", "--out", str(fetched)]) == 0
    os.truncate(fetched / "model.safetensors", 1000)
    monkeypatch.setattr(prefetch, "snapshot_download", lambda *_, **__: None)
    assert prefetch.main(["org/tiny", "--out", str(fetched)]) == 1
