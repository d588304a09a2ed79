"""Version stamps as engines keep them and environment workers fetch them: `GET /prime_hpc/stamps/{session}`."""

import zlib

import msgspec
import numpy as np

Span = tuple[str, int, int]
"""(version, first token, one past the last token)."""


class Stamp(msgspec.Struct, kw_only=True):
    """The versions of one finished request. `crc` is the `checksum` of its completion ids."""

    request_id: str
    tokens: int
    crc: int
    spans: list[Span]


class StampReply(msgspec.Struct):
    """Stamps of a session, in order of completion; empty where nothing is known."""

    requests: list[Stamp]


def checksum(token_ids: list[int] | np.ndarray) -> int:
    """CRC-32 of token ids as little-endian int32."""
    return zlib.crc32(np.asarray(token_ids, dtype="<i4").tobytes())
