"""Versions that ranks write together, file by file: what a checkpoint holds, byte for byte, whole and by deltas."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_hpc.inference.host_copy import HostCopy
from prime_hpc.trainer.weights_files import deal, divide, file_bytes
from prime_hpc.transport.weights import verify
from tests.models_support import save_model
from tests.parallel_support import write_versions
from tests.ranks import run_ranks

MIB = 2**20


def read(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by file."""
    return {path.name: load_file(path) for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_write_the_files_of_one_version_among_them(ranks: int, tmp_path: Path) -> None:
    save_model("glm4_moe", tmp_path / "model")
    shares = run_ranks(ranks, write_versions, ranks, tmp_path / "store", tmp_path / "model", tmp_path)
    (stored,) = read(tmp_path / "model").values()
    for step in (0, 2):
        files = read(tmp_path / f"v0.{step}")
        assert len(verify(tmp_path / f"v0.{step}").files) == len(files) > 2 * ranks
        index = json.loads((tmp_path / f"v0.{step}" / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
        published = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
        assert published.keys() == stored.keys()
        for name, tensor in published.items():
            learns = not name.endswith("e_score_correction_bias")
            expected = stored[name].bfloat16() * 2**step if learns else stored[name]
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
    written = sorted(name for share in shares for name in share)
    assert written == sorted([*files, *(f"{file}.delta" for file in files)])
    assert all(shares)
    copy = HostCopy(tmp_path / "copy")
    for step in range(3):
        folder = copy.bring(tmp_path / f"v0.{step}")
    assert not list((tmp_path / "v0.1").glob("*.safetensors"))
    assert all((folder / file).read_bytes() == (tmp_path / "v0.2" / file).read_bytes() for file in files)


def test_files_are_small_enough_to_be_gathered_one_by_one_and_shared_out_by_size() -> None:
    assert [file_bytes(total * MIB, ranks) for total, ranks in ((10, 1), (1024, 1), (1024, 2), (10**6, 8))] == [
        64 * MIB, 256 * MIB, 128 * MIB, 1000 * MIB]  # fmt: skip
    assert divide({"a": 5, "b": 5, "c": 9, "d": 1}, 10) == {
        "model-00001-of-00002.safetensors": ["a", "b"],
        "model-00002-of-00002.safetensors": ["c", "d"],
    }
    assert divide({"a": 5}, 10) == {"model.safetensors": ["a"]}
    assert deal({"a": 3, "b": 9, "c": 4, "d": 3}, 2) == {"b": 0, "c": 1, "a": 1, "d": 1}
