"""An engine's copy of the weights follows deltas, and starts anew from a whole version where they do not lead on."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from prime_hpc.errors import CorruptData
from prime_hpc.inference.host_copy import HostCopy
from prime_hpc.transport import delta
from prime_hpc.transport.weights import Delta, WeightsManifest, entry_of, verify, write_manifest

FILE = "model.safetensors"
NEWEST = 5


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Versions 0.0 to 0.5 of one file: 0.0 and 0.3 whole, all but 0.0 as deltas."""
    data = content(0)
    for step in range(NEWEST + 1):
        directory, old = tmp_path / f"v0.{step}", data
        directory.mkdir()
        data = content(step)
        (directory / FILE).write_bytes(data.tobytes())
        files, changes = {FILE: entry_of(directory / FILE)}, None
        if step:
            path = directory / f"{FILE}.delta"
            path.write_bytes(delta.encode(old, data))
            changes = Delta(base=f"0.{step - 1}", files={FILE: entry_of(path)})
        if step not in (0, 3):
            (directory / FILE).unlink()
        write_manifest(directory, WeightsManifest(version=f"0.{step}", dtype="bfloat16", files=files,
                                                  whole=step in (0, 3), delta=changes))  # fmt: skip
    return tmp_path


def content(step: int) -> np.ndarray:
    words = np.random.default_rng(0).integers(0, 2**16, 3000).astype(np.uint16)
    words[:: 7 + step] += step
    return words.view(np.uint8)


def held(folder: Path) -> bytes:
    verify(folder)
    return (folder / FILE).read_bytes()


@pytest.mark.parametrize("path", [[5], [0, 1, 2, 3, 4, 5], [1, 4], [3, 5], [5, 5]])
def test_any_way_leads_to_the_same_bytes(weights: Path, tmp_path: Path, path: list[int]) -> None:
    copy = HostCopy(tmp_path / "copy")
    for step in path:
        folder = copy.bring(weights / f"v0.{step}")
        assert (copy.version, held(folder)) == (f"0.{step}", content(step).tobytes())


def test_a_copy_needs_no_whole_version_once_it_is_there(weights: Path, tmp_path: Path) -> None:
    copy = HostCopy(tmp_path / "copy")
    copy.bring(weights / "v0.2")
    for step in (0, 1, 2):
        shutil.rmtree(weights / f"v0.{step}")
    (weights / "v0.3" / FILE).write_bytes(b"damaged")
    assert held(copy.bring(weights / "v0.5")) == content(5).tobytes()


def test_a_copy_that_turns_out_wrong_starts_anew(weights: Path, tmp_path: Path) -> None:
    copy = HostCopy(tmp_path / "copy")
    with (copy.bring(weights / "v0.1") / FILE).open("r+b") as file:
        file.write(b"damage")
    assert held(copy.bring(weights / "v0.5")) == content(5).tobytes()


def test_a_damaged_delta_is_refused_and_the_copy_recovers(weights: Path, tmp_path: Path) -> None:
    copy = HostCopy(tmp_path / "copy")
    copy.bring(weights / "v0.3")
    path = weights / "v0.4" / f"{FILE}.delta"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CorruptData, match="v0.4/model.safetensors.delta does not match its digest"):
        copy.bring(weights / "v0.4")
    path.write_bytes(good)
    assert held(copy.bring(weights / "v0.5")) == content(5).tobytes()


def test_a_newcomer_without_a_whole_version_says_so(weights: Path, tmp_path: Path) -> None:
    for step in (0, 1, 2, 3):
        shutil.rmtree(weights / f"v0.{step}")
    with pytest.raises(CorruptData, match="v0.3 has no readable manifest"):
        HostCopy(tmp_path / "copy").bring(weights / "v0.5")
