"""Lustre, by a stand-in for its `lfs`; and a model fetched for nodes without a network."""

import os
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
    """From a folder, and by name."""
    asked: list[tuple[str, dict]] = []
    monkeypatch.setattr(prefetch, "snapshot_download", lambda name, **options: asked.append((name, options)))
    fetched = tmp_path / "model"
    assert prefetch.main([str(tiny_model), "--out", str(fetched)]) == 0
    assert (fetched / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()
    assert asked == []
    os.truncate(fetched / "model.safetensors", 1000)
    assert prefetch.main(["org/tiny", "--out", str(fetched), "--dataset", "org/tasks"]) == 1
    assert [(name, options.get("local_dir"), options.get("repo_type")) for name, options in asked] == [
        ("org/tiny", fetched, None), ("org/tasks", None, "dataset")]  # fmt: skip
