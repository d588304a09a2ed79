"""Deltas of files and buckets of tensors: exact there and back, and damage is noticed before anything is used."""

import numpy as np
import pytest
import torch

from prime_hpc.errors import CorruptData
from prime_hpc.transport import delta
from prime_hpc.transport.buckets import ROW_BYTES, Layout, checksum, pack, unpack
from prime_hpc.transport.weights import TensorEntry


def words(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**16, count).astype(np.uint16).view(np.uint8)


def changed(old: np.ndarray, share: float) -> np.ndarray:
    new, rng = old.copy(), np.random.default_rng(7)
    places = np.flatnonzero(rng.random(len(old) // 2) < share)
    new.view(np.uint16)[places] ^= rng.integers(1, 2**16, len(places)).astype(np.uint16)
    return new


@pytest.mark.parametrize("count", [1, 255, 256, 257, 10_000])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_a_delta_leads_from_the_old_file_to_the_new(monkeypatch: pytest.MonkeyPatch, count: int, share: float) -> None:
    monkeypatch.setattr(delta, "BLOCK_WORDS", 1024)
    old = words(count, 0)
    new, data = changed(old, share), old.copy()
    delta.apply(data, delta.encode(old, new))
    assert (data == new).all()


def test_a_delta_is_small_where_little_changed() -> None:
    old = words(2**20, 0)
    assert len(delta.encode(old, old)) == 1
    assert len(delta.encode(old, changed(old, 0.01))) < 0.02 * len(old)


def test_a_damaged_delta_is_refused() -> None:
    old = words(4096, 0)
    damaged = bytearray(delta.encode(old, changed(old, 0.1)))
    damaged[20] ^= 255
    with pytest.raises(CorruptData, match="a delta of weights is damaged"):
        delta.apply(old.copy(), bytes(damaged))


ENTRIES = [TensorEntry("w", "bfloat16", [33, 100]), TensorEntry("empty", "float32", [0, 4]),
           TensorEntry("scale", "float32", [])]  # fmt: skip


def test_a_bucket_gives_back_what_was_packed() -> None:
    layout = Layout.of(ENTRIES)
    given = [torch.randn(entry.shape) for entry in ENTRIES]
    bucket = pack(layout, given, torch.device("cpu"))
    assert len(bucket) == layout.nbytes and layout.nbytes % ROW_BYTES == 0
    got = dict(unpack(layout, bucket))
    assert torch.equal(got["w"], given[0].to(torch.bfloat16)) and torch.equal(got["scale"], given[2])
    assert got["empty"].shape == (0, 4)


@pytest.mark.parametrize("at", [0, 1, 6599])
def test_any_changed_byte_names_its_tensor(at: int) -> None:
    layout = Layout.of(ENTRIES)
    bucket = pack(layout, [torch.randn(entry.shape) for entry in ENTRIES], torch.device("cpu"))
    bucket[layout.spans[0][0] + at] ^= 4
    with pytest.raises(CorruptData, match=r"^w changed on the way \(1 of 3 tensors of a bucket\)"):
        next(unpack(layout, bucket))


def test_checksums_tell_an_exchange_of_words() -> None:
    data = torch.arange(2 * ROW_BYTES // 4, dtype=torch.int32)
    swapped = data.clone()
    swapped[[3, 1500]] = data[[1500, 3]]
    assert not torch.equal(checksum(data.view(torch.uint8)), checksum(swapped.view(torch.uint8)))
    rows = data.view(2, -1).sum(1)
    columns = data.view(2, -1).sum(0)
    assert checksum(data.view(torch.uint8)).tolist() == [
        int(sum((i + 1) * r for i, r in enumerate(rows.tolist()))),
        int(sum((i + 1) * c for i, c in enumerate(columns.tolist()))),
    ]
