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

from prime_hpc.cluster.files import append
from prime_hpc.cluster.patience import Patience
from prime_hpc.cluster.role import Role
from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.transport.checkpoints import CheckpointManifest
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
    """Batch `step` took these groups under `lineage`; `sample_ids` are what it trains, in order."""

    step: int
    lineage: int
    group_ids: list[str]
    sample_ids: list[str]
    memory: Memory = msgspec.field(default_factory=Memory)
    max_staleness: int | None = None
    """The bound in force, which may change while the run works."""


class GroupsDropped(msgspec.Struct, tag=True, kw_only=True):
    """Groups that will be in no batch, and why."""

    group_ids: list[str]
    reason: str


class AttemptStarted(msgspec.Struct, tag=True, kw_only=True):
    """An attempt of the run opened the journal for the first time."""

    attempt: int


Record = GroupOpened | RolloutFinished | BatchCut | GroupsDropped | AttemptStarted
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


@dataclass
class RecordedGroup:
    """A group as the journal tells it."""

    opened: GroupOpened
    done: list[RolloutDone] = field(default_factory=list)


@dataclass
class RecordedBatch:
    """A batch as the journal tells it; `offset` is where the journal goes on behind it, `before` the memory that it was
    made with."""

    cut: BatchCut
    groups: list[RecordedGroup]
    offset: int
    before: Memory


@dataclass
class JournalState:
    """What a replay found: groups not yet in a batch, draws of each source, and every batch with its groups."""

    groups: dict[str, RecordedGroup] = field(default_factory=dict)
    draws: dict[str, int] = field(default_factory=dict)
    batches: dict[int, RecordedBatch] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    """Group id -> reason."""
    step: int = 0
    attempt: int = 0
    memory: Memory = field(default_factory=Memory)
    """As of the last batch."""
    drawn: list[str] = field(default_factory=list)
    """Sources of the groups that were opened since."""

    def apply(self, record: Record, offset: int) -> None:
        """Take in the record that ends at `offset`."""
        match record:
            case GroupOpened():
                self.groups[record.group_id] = RecordedGroup(record)
                self.draws[record.source] = max(self.draws.get(record.source, 0), record.draw + 1)
                self.drawn.append(record.source)
            case RolloutFinished():
                if record.group_id in self.groups:
                    self.groups[record.group_id].done.append(record.done)
            case BatchCut():
                groups = [self.groups.pop(group_id) for group_id in record.group_ids]
                self.batches[record.step] = RecordedBatch(record, groups, offset, self.memory)
                self.step, self.memory, self.drawn = record.step, record.memory, []
            case GroupsDropped():
                for group_id in record.group_ids:
                    self.groups.pop(group_id, None)
                    self.dropped[group_id] = record.reason
            case AttemptStarted():
                self.attempt = record.attempt

    def forget(self, step: int) -> None:
        """Let go of the batches up to `step`, which a checkpoint covers."""
        self.batches = {n: batch for n, batch in self.batches.items() if n > step}


class Journal:
    """The journal file, open for appending."""

    patience: Patience | None = None
    """How records wait for space on a full disk; without it they fail."""

    def __init__(self, path: Path, state: JournalState):
        self.state = state
        self._file = path.open("ab", buffering=0)

    @classmethod
    def start(cls, path: Path) -> "Journal":
        """A journal without records; one that lies at `path` is replaced."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(MAGIC)
        return cls(path, JournalState())

    @classmethod
    def reopen(cls, path: Path, covered: int = 0, offset: int = 0, *, rewind: bool = False) -> "Journal":
        """Replay `path` and go on with it.

        `covered` is the step of the checkpoint that the trainer goes on from, `offset` the journal's in it. Batches up
        to that step are let go; with `rewind` everything behind `offset` is, else every whole record is kept.

        Raises:
            SchemaMismatch: the file is no journal of this schema version.
            CorruptData: a record before `offset` is missing or damaged.
        """
        state, end = JournalState(), len(MAGIC)
        for record, end in read(path, offset if rewind else None):
            state.apply(record, end)
            state.forget(covered)
        if end < offset:
            raise CorruptData(f"{path} is whole up to byte {end}, the checkpoint wants {offset}: the journal was cut")
        os.truncate(path, end)
        return cls(path, state)

    @property
    def offset(self) -> int:
        """Bytes written so far: where a resume that knows everything up to now begins."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, record: Record, *, durable: bool = False) -> None:
        """Add a record; `durable` flushes it to disk before returning."""
        payload = _encoder.encode(record)
        frame = _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
        if self.patience:
            self.patience.write("the journal", lambda: append(self._file, frame))
        else:
            append(self._file, frame)
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: Path, upto: int | None = None) -> Iterator[tuple[Record, int]]:
    """Records of a journal, each with the offset behind it, up to an offset or up to the last whole record.

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
        position += _FRAME.size + length
        yield _decoder.decode(payload), position


def open_journal(role: Role, checkpoint: CheckpointManifest | None) -> Journal:
    """The journal of this start of the orchestrator.

    A new run begins one. A later attempt goes on with all of it, unless it was told to go back to an older checkpoint;
    so does a later start within an attempt, whatever the attempt itself was told.
    """
    path = role.paths.journal
    covered, offset = (checkpoint.step, checkpoint.journal_offset) if checkpoint else (0, 0)
    known = path.exists() and role.plan.attempt > 1 or role.restart > 0
    if not known or not path.exists():
        journal = Journal.start(path)
    elif role.plan.rewind and _attempt(path) != role.plan.attempt:
        journal = Journal.reopen(path, covered, offset, rewind=True)
    else:
        journal = Journal.reopen(path, covered, offset)
    journal.patience = role.patience
    if journal.state.attempt != role.plan.attempt:
        journal.append(AttemptStarted(attempt=role.plan.attempt), durable=True)
    return journal


def _attempt(path: Path) -> int:
    """The attempt that last wrote to a journal."""
    return max((record.attempt for record, _ in read(path) if isinstance(record, AttemptStarted)), default=0)
