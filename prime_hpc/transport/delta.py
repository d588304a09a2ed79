"""What changed between two versions of a file of equal length, as few bytes.

Training changes few of the bytes of bfloat16 weights. A file is taken as 16-bit words, in rows of 256. Of each block of
rows are kept: how many words of each row changed, in which columns (as steps from one change to the next, modulo 256),
and by what (old xor new); zstd compresses the three together.
"""

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from prime_hpc.errors import CorruptData

COLUMNS = 256
BLOCK_WORDS = 2**23
"""Words that are worked on at once; a multiple of COLUMNS."""
LEVEL = 1

Bytes = NDArray[np.uint8]


class _Block(msgspec.Struct, array_like=True):
    """The changes of one block, compressed; `changes` counts its changed words."""

    start: int
    changes: int
    data: bytes


def encode(old: Bytes, new: Bytes) -> bytes:
    """The delta that turns `old` into `new`, uint8[n] both."""
    before, after = _words(old), _words(new)
    blocks = (_encode_block(start, before[start : start + BLOCK_WORDS], after[start : start + BLOCK_WORDS])
              for start in range(0, len(before), BLOCK_WORDS))  # fmt: skip
    return msgspec.msgpack.encode([block for block in blocks if block.changes])


def apply(data: Bytes, delta: bytes) -> None:
    """Turn `data`, the file that `delta` was made from, into the new one, in place.

    Raises:
        CorruptData: the delta is damaged.
    """
    body = data[: len(data) // 2 * 2].view(np.uint16)
    try:
        for block in msgspec.msgpack.decode(delta, type=list[_Block]):
            _apply_block(body[block.start : block.start + BLOCK_WORDS], block)
    except (msgspec.MsgspecError, zstandard.ZstdError, ValueError, IndexError) as error:
        raise CorruptData(f"a delta of weights is damaged: {error}") from error


def _words(data: Bytes) -> NDArray[np.uint16]:
    """uint16[n/2]. A file of safetensors has an even length unless it holds tensors of single bytes."""
    if len(data) % 2:
        raise ValueError(f"a file of {len(data)} bytes cannot be taken as 16-bit words")
    return data.view(np.uint16)


def _encode_block(start: int, before: NDArray[np.uint16], after: NDArray[np.uint16]) -> _Block:
    places = np.flatnonzero(before != after)
    rows = np.bincount(places // COLUMNS, minlength=-(-len(before) // COLUMNS)).astype(np.uint16)
    steps = np.diff(places, prepend=0).astype(np.uint8)
    changes = before[places] ^ after[places]
    data = rows.tobytes() + steps.tobytes() + changes.tobytes()
    return _Block(start, len(places), zstandard.ZstdCompressor(level=LEVEL).compress(data))


def _apply_block(words: NDArray[np.uint16], block: _Block) -> None:
    n_rows = -(-len(words) // COLUMNS)
    raw = zstandard.ZstdDecompressor().decompress(block.data)
    rows, steps, changes = np.split(np.frombuffer(raw, np.uint8), [2 * n_rows, 2 * n_rows + block.changes])
    columns = np.cumsum(steps, dtype=np.uint8)
    places = np.repeat(np.arange(n_rows) * COLUMNS, rows.view(np.uint16)) + columns
    words[places] ^= np.frombuffer(changes.tobytes(), np.uint16)
