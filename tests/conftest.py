"""Fixtures that every test may use."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_hpc.cluster.garbage import lasting
from prime_hpc.models.tiny import make_tiny_model
from prime_hpc.models.tiny_vision import make_vision_model
from tests.disks import mounted

# a shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for every test, so that no secret of a test run lands among the user's."""
    home = tmp_path_factory.mktemp("prime_hpc_home")
    monkeypatch.setenv("PRIME_HPC_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny Qwen3 of seed 0 with its character tokenizer; tests must not write to it."""
    path = tmp_path_factory.mktemp("tiny_model")
    make_tiny_model(path, seed=0)
    return path


@pytest.fixture(scope="session")
def tiny_vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny Qwen3-VL of seed 0 with its tokenizer and image processor; tests must not write to it."""
    path = tmp_path_factory.mktemp("tiny_vision_model")
    make_vision_model(path, seed=0)
    return path


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system that holds one and a half checkpoints of the tiny model; needs the right to mount."""
    with mounted(tmp_path / "disk", mebibytes=16) as disk:
        yield disk


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Modules of tests, and the libraries that they import, stay to the end."""
    with lasting():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where CUDA is absent; torch is imported only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()
