"""Files of the journal: `rollouts/journal/BASE.bin`, each named by the byte of the whole journal that it begins at.

An offset counts the bytes of all segments, those that were removed too. A record is framed by its length and CRC32.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.cluster.files import list_fresh, write_atomic
from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.transport.messages import SCHEMA_VERSION

MAGIC = b"prime_hpc journal %d\n" % SCHEMA_VERSION
SUFFIX = ".bin"
_FRAME = struct.Struct("<II")


@dataclass(frozen=True)
class Segment:
    """One file; `base` is the offset of its first byte."""

    path: Path
    base: int


def find_segments(directory: Path) -> list[Segment]:
    """All segments, oldest first."""
    names = sorted(n for n in list_fresh(directory) if n.endswith(SUFFIX) and not n.startswith("."))
    return [Segment(directory / name, int(name.removesuffix(SUFFIX))) for name in names]


def begin_segment(directory: Path, base: int, first: bytes) -> Segment:
    """A new segment that holds the record `first`, whole or absent, and flushed to disk."""
    segment = Segment(directory / f"{base:020d}{SUFFIX}", base)
    write_atomic(segment.path, MAGIC + frame(first))
    return segment


def frame(payload: bytes) -> bytes:
    """A record as it lies in the file."""
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def read_segments(segments: Sequence[Segment], upto: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Records of segments that follow one another, each with the offset behind it, up to the offset `upto`.

    A segment counts up to where the next begins; what lies behind that was torn off by a crash, or written by a process
    that was fenced off. Without `upto` what a crash tore off at the very end is left out.

    Raises:
        SchemaMismatch: a file is no segment of this schema version.
        CorruptData: a record is damaged, or one is missing before `upto` or before the next segment.
    """
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        ends = [end for end in (upto, following and following.base) if end is not None]
        if upto is None or segment.base < upto:
            yield from _scan(segment, min(ends, default=None))


def _scan(segment: Segment, upto: int | None) -> Iterator[tuple[bytes, int]]:
    """Records of one file; where `upto` is given, all up to there have to be whole."""
    data = segment.path.read_bytes()
    if not data.startswith(MAGIC):
        raise SchemaMismatch(f"{segment.path} is not a journal of schema {SCHEMA_VERSION}")
    position, end = len(MAGIC), len(data) if upto is None else upto - segment.base
    while position < end:
        payload = _payload(data, position)
        if payload is None:
            if upto is None and _is_torn(data, position):
                return
            what = "was cut" if len(data) < end else f"is damaged at byte {position}"
            raise CorruptData(f"{segment.path} {what}; resume=STEP goes on from a checkpoint before that")
        position += _FRAME.size + len(payload)
        yield payload, segment.base + position


def _payload(data: bytes, position: int) -> bytes | None:
    """The record at `position`, or None where there is no whole one."""
    begin = position + _FRAME.size
    if begin > len(data):
        return None
    length, checksum = _FRAME.unpack_from(data, position)
    payload = data[begin : begin + length]
    return payload if length and len(payload) == length and zlib.crc32(payload) == checksum else None


def _is_torn(data: bytes, position: int) -> bool:
    """Whether what begins at `position` was the last write, of which a crash left a part, or only zeros."""
    begin = position + _FRAME.size
    if begin > len(data) or not data[position:].strip(b"\0"):
        return True
    return begin + _FRAME.unpack_from(data, position)[0] >= len(data)
