"""Tensors on the wire: buckets of bytes that carry their own checksums.

A bucket is uint8[n] in rows of 4096 bytes: two int64 of checksum for each tensor, then the tensors, each from the begin
of a row and padded with zeros. Sender and receiver derive the layout from the same list of entries.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from prime_hpc.errors import CorruptData
from prime_hpc.transport.weights import TensorEntry

ROW_BYTES = 4096
SUM_BYTES = 16


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a bucket lie: `spans` in bytes, padding included, and the size of the whole."""

    entries: list[TensorEntry]
    spans: list[tuple[int, int]]
    nbytes: int

    @classmethod
    def of(cls, entries: list[TensorEntry]) -> "Layout":
        end, spans = _padded(SUM_BYTES * len(entries)), []
        for entry in entries:
            begin, end = end, end + _padded(size_of(entry))
            spans.append((begin, end))
        return cls(entries, spans, end)


def size_of(entry: TensorEntry) -> int:
    """Bytes of a tensor."""
    return torch.Size(entry.shape).numel() * dtype_of(entry).itemsize


def dtype_of(entry: TensorEntry) -> torch.dtype:
    return getattr(torch, entry.dtype)


def pack(layout: Layout, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A bucket of `tensors`, one for each entry and in that order, cast to the dtypes of the entries."""
    bucket = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    for tensor, entry, (begin, _) in zip(tensors, layout.entries, layout.spans, strict=True):
        _view(bucket, entry, begin).copy_(tensor)
    _sums(bucket, layout).copy_(_measure(bucket, layout))
    return bucket


def unpack(layout: Layout, bucket: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, which are views of the bucket.

    Raises:
        CorruptData: before the first one, where a tensor is not what was sent; it is named.
    """
    wrong = (_measure(bucket, layout) != _sums(bucket, layout)).any(1).tolist()
    names = [entry.name for entry, bad in zip(layout.entries, wrong, strict=True) if bad]
    if names:
        raise CorruptData(
            f"{', '.join(names[:3])} changed on the way ({len(names)} of {len(wrong)} tensors of a bucket)"
        )
    for entry, (begin, _) in zip(layout.entries, layout.spans, strict=True):
        yield entry.name, _view(bucket, entry, begin)


def sums_of(layout: Layout, bucket: Tensor) -> bytes:
    """The checksums that a bucket carries."""
    return _sums(bucket, layout).cpu().numpy().tobytes()


def checksum(data: Tensor) -> Tensor:
    """int64[2] of uint8[n], n a multiple of `ROW_BYTES`.

    Sums of the rows and of the columns of its 32-bit words, each weighted by its number, modulo 2**64: the same on any
    device, as integers add up in any order, and made without a copy of the data.
    """
    words = data.view(torch.int32).view(-1, ROW_BYTES // 4)
    by_row, by_column = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
    return torch.stack([_weighted(by_row), _weighted(by_column)])


def digest(sums: Iterable[bytes]) -> str:
    """One digest, hex, over the checksums of all buckets in order."""
    return blake3(b"".join(sums)).hexdigest()


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


def _measure(bucket: Tensor, layout: Layout) -> Tensor:
    """int64[tensors, 2]"""
    return torch.stack([checksum(bucket[begin:end]) for begin, end in layout.spans])


def _sums(bucket: Tensor, layout: Layout) -> Tensor:
    return bucket[: SUM_BYTES * len(layout.entries)].view(torch.int64).view(-1, 2)


def _view(bucket: Tensor, entry: TensorEntry, begin: int) -> Tensor:
    return bucket[begin : begin + size_of(entry)].view(dtype_of(entry)).view(entry.shape)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ROW_BYTES) * ROW_BYTES
