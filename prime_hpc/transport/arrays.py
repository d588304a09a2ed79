"""Numeric streams on the wire: raw little-endian bytes with dtype and length, never lists."""

import msgspec
import numpy as np

from prime_hpc.errors import CorruptData

DTYPES = {"bool": np.dtype("?"), "u1": np.dtype("u1"), "i2": np.dtype("<i2"), "i4": np.dtype("<i4"),
          "i8": np.dtype("<i8"), "f4": np.dtype("<f4")}  # fmt: skip


class Array(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A one-dimensional numeric stream. `dtype` is a key of `DTYPES`; `length` counts elements."""

    dtype: str
    length: int
    data: bytes

    @classmethod
    def of(cls, values, dtype: str) -> "Array":
        """Pack `values` (any sequence or ndarray of shape [n]) as `dtype`."""
        packed = np.ascontiguousarray(values, dtype=DTYPES[dtype])
        if packed.ndim != 1:
            raise ValueError(f"a stream has one dimension, got shape {packed.shape}")
        return cls(dtype, len(packed), packed.tobytes())

    def numpy(self) -> np.ndarray:
        """A read-only view of shape [length].

        Raises:
            CorruptData: unknown dtype, or fewer or more bytes than `length` elements need.
        """
        if self.dtype not in DTYPES or len(self.data) != self.length * DTYPES[self.dtype].itemsize:
            raise CorruptData(f"a stream of {self.length} x {self.dtype} holds {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype=DTYPES[self.dtype])

    def __len__(self) -> int:
        return self.length
