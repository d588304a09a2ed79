"""The orchestrator's append-only journal: what was drawn, what finished, what went into which batch.

A record is framed by its length and CRC32; a tail cut by a crash is dropped at the next opening. Replaying the journal
up to the offset in a checkpoint's manifest rebuilds the scheduler: groups that are ready, groups with rollouts missing
(their task keeps its id), and how many tasks each source has drawn.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.transport.messages import SCHEMA_VERSION, PolicyVersion, RolloutDone

MAGIC = b"prime_hpc journal %d\n" % SCHEMA_VERSION
_FRAME = struct.Struct("<II")


class GroupOpened(msgspec.Struct, tag=True, kw_only=True):
    """The `draw`-th task of a source (counted from 0) was drawn for a group."""

    group_id: str
    source: str
    draw: int
    task_index: int
    version: PolicyVersion


class RolloutFinished(msgspec.Struct, tag=True, kw_only=True):
    """A rollout of a group ended, with a reward or a failure that will not be retried."""

    group_id: str
    done: RolloutDone


class Memory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What credit assignment (by source) and task order remember from batch to batch."""

    credit: dict[str, dict[str, float]] = {}
    tasks: dict[str, Any] = {}


class BatchCut(msgspec.Struct, tag=True, kw_only=True):
    """Batch `step` took these groups; `sample_ids` are what it trains, in order."""

    step: int
    group_ids: list[str]
    sample_ids: list[str]
    memory: Memory = msgspec.field(default_factory=Memory)


Record = GroupOpened | RolloutFinished | BatchCut
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


@dataclass
class JournalState:
    """What a replay found: groups not yet in a batch, their finished rollouts, draws of each source, and the memory of
    the last batch."""

    groups: dict[str, GroupOpened] = field(default_factory=dict)
    rollouts: dict[str, list[RolloutDone]] = field(default_factory=dict)
    draws: dict[str, int] = field(default_factory=dict)
    step: int = 0
    memory: Memory = field(default_factory=Memory)

    def apply(self, record: Record) -> None:
        if isinstance(record, GroupOpened):
            self.groups[record.group_id] = record
            self.rollouts[record.group_id] = []
            self.draws[record.source] = max(self.draws.get(record.source, 0), record.draw + 1)
        elif isinstance(record, RolloutFinished):
            if record.group_id in self.rollouts:
                self.rollouts[record.group_id].append(record.done)
        else:
            self.step, self.memory = record.step, record.memory
            for group_id in record.group_ids:
                self.groups.pop(group_id, None)
                self.rollouts.pop(group_id, None)


class Journal:
    """The journal file, open for appending."""

    def __init__(self, path: Path, upto: int | None = None):
        """Open `path`; `upto` is the offset to resume from: what lies behind it is dropped. None starts anew."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.state = JournalState()
        if upto is None:
            path.write_bytes(MAGIC)
        else:
            for record in read(path, upto):
                self.state.apply(record)
            os.truncate(path, upto)
        self._file = path.open("ab")

    @property
    def offset(self) -> int:
        """Bytes written so far: where a resume that knows everything up to now begins."""
        return self._file.tell()

    def append(self, record: Record, *, durable: bool = False) -> None:
        """Add a record; `durable` flushes it to disk before returning."""
        payload = _encoder.encode(record)
        self._file.write(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: Path, upto: int | None = None) -> Iterator[Record]:
    """Records of a journal up to an offset, or up to the last whole record.

    Raises:
        SchemaMismatch: the file is no journal of this schema version.
        CorruptData: a record before `upto` is cut or damaged.
    """
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise SchemaMismatch(f"{path} is not a journal of schema {SCHEMA_VERSION}")
    if upto is not None and len(data) < upto:
        raise CorruptData(f"{path} has {len(data)} bytes, the checkpoint wants {upto}: the journal was cut")
    position, end = len(MAGIC), upto if upto is not None else len(data)
    while position + _FRAME.size <= end:
        length, checksum = _FRAME.unpack_from(data, position)
        payload = data[position + _FRAME.size : position + _FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            if upto is None:
                return
            raise CorruptData(f"{path} is damaged at byte {position}")
        yield _decoder.decode(payload)
        position += _FRAME.size + length
