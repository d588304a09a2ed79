"""The orchestrator's append-only journal: what was drawn, what finished, what went into which batch.

Replaying it rebuilds the scheduler: groups that are ready, groups with rollouts missing (their task keeps its id), and
how many tasks each source has drawn. A new segment begins with every start of the orchestrator, so that what one that
was fenced off still writes reaches nobody, and at every complete checkpoint. Its first record is the state that all
before it have left. A segment goes once no checkpoint that is kept needs it.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prime_hpc.cluster.files import append
from prime_hpc.cluster.patience import Patience
from prime_hpc.cluster.role import Role
from prime_hpc.errors import CorruptData
from prime_hpc.orchestrator.segments import Segment, begin_segment, find_segments, frame, read_segments
from prime_hpc.transport.checkpoints import CheckpointManifest
from prime_hpc.transport.messages import PolicyVersion, RolloutDone

T = TypeVar("T")

TRAINED = "trained"
"""The fate of a group that went into a batch; others are reasons for dropping it."""


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
    lr: float | None = None
    """What was in force, since both may change while the run works."""


class GroupsDropped(msgspec.Struct, tag=True, kw_only=True):
    """Groups that will be in no batch, and why."""

    group_ids: list[str]
    reason: str


class RecordedGroup(msgspec.Struct, kw_only=True):
    """A group as the journal tells it."""

    opened: GroupOpened
    done: list[RolloutDone] = []


class RecordedBatch(msgspec.Struct, kw_only=True):
    """A batch as the journal tells it; `offset` is where the journal goes on behind it, `before` the memory that it was
    made with."""

    cut: BatchCut
    groups: list[RecordedGroup]
    offset: int
    before: Memory


class JournalState(msgspec.Struct, tag=True, kw_only=True):
    """What all records up to a point come to; the first record of every segment is one.

    `groups` are in no batch yet; `batches` are those behind step `covered`, of which a checkpoint was complete.
    """

    covered: int = 0
    groups: dict[str, RecordedGroup] = {}
    batches: dict[int, RecordedBatch] = {}
    draws: dict[str, int] = {}
    """Groups that were ever opened, by source."""
    fates: dict[str, int] = {}
    """What became of those that are no longer among `groups`: how many were trained, or dropped for which reason."""
    step: int = 0
    attempt: int = 1
    memory: Memory = msgspec.field(default_factory=Memory)
    """As of the last batch."""
    drawn: list[str] = []
    """Sources of the groups that were opened since."""

    def apply(self, record: "Record", offset: int) -> None:
        """Take in the record that ends at `offset`."""
        match record:
            case GroupOpened():
                self.groups[record.group_id] = RecordedGroup(opened=record)
                self.draws[record.source] = max(self.draws.get(record.source, 0), record.draw + 1)
                self.drawn.append(record.source)
            case RolloutFinished():
                if record.group_id in self.groups:
                    self.groups[record.group_id].done.append(record.done)
            case BatchCut():
                groups = [self._close(group_id, TRAINED) for group_id in record.group_ids]
                self.batches[record.step] = RecordedBatch(cut=record, groups=groups, offset=offset, before=self.memory)
                self.step, self.memory, self.drawn = record.step, record.memory, []
                self.cover(self.covered)
            case GroupsDropped():
                for group_id in record.group_ids:
                    self._close(group_id, record.reason)

    def cover(self, step: int) -> None:
        """Let go of the batches up to `step`, since a checkpoint covers them."""
        self.covered = step
        self.batches = {n: batch for n, batch in self.batches.items() if n > step}

    def _close(self, group_id: str, fate: str) -> RecordedGroup:
        self.fates[fate] = self.fates.get(fate, 0) + 1
        return self.groups.pop(group_id)


Record = GroupOpened | RolloutFinished | BatchCut | GroupsDropped | JournalState
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Journal:
    """The newest segment, open for appending. `state` is always that of the last record."""

    patience: Patience | None = None
    """How records wait for space on a full disk; without it they fail."""

    def __init__(self, directory: Path, segment: Segment, state: JournalState):
        self.state = state
        self._directory = directory
        self._open(segment)

    @classmethod
    def start(cls, directory: Path, *, attempt: int = 1) -> "Journal":
        """A journal without records; one that lies in `directory` is replaced."""
        shutil.rmtree(directory, ignore_errors=True)
        state = JournalState(attempt=attempt)
        return cls(directory, begin_segment(directory, 0, _encoder.encode(state)), state)

    @classmethod
    def reopen(cls, directory: Path, covered: int = 0, offset: int = 0, *, rewind: bool = False,
               attempt: int = 1) -> "Journal":  # fmt: skip
        """Replay the journal and go on with it in a new segment.

        `covered` is the step of the checkpoint that the trainer goes on from, `offset` the journal's in it. Batches up
        to that step are let go; with `rewind` everything behind `offset` is, else every whole record is kept.

        Raises:
            SchemaMismatch: a file is no journal of this schema version.
            CorruptData: a record before `offset` is missing or damaged, or the journal no longer reaches back so far.
        """
        state, end = replay(directory, covered, offset if rewind else None)
        if end < offset:
            raise CorruptData(f"{directory} is whole up to offset {end}, the checkpoint wants {offset}: the journal "
                              "was cut")  # fmt: skip
        for segment in find_segments(directory):
            if segment.base >= end:
                segment.path.unlink()
        state.attempt = attempt
        return cls(directory, begin_segment(directory, end, _encoder.encode(state)), state)

    @property
    def offset(self) -> int:
        """Where a resume that knows everything up to now begins."""
        return self._base + os.fstat(self._file.fileno()).st_size

    def append(self, record: Record) -> None:
        """Add a record, which outlives this process; see `flush`."""
        framed = frame(_encoder.encode(record))
        self._patiently(lambda: append(self._file, framed))
        self.state.apply(record, self.offset)

    async def flush(self) -> None:
        """Return once the records up to now outlive this node, which takes seconds where weights are being written to
        the same disk."""
        descriptor = os.dup(self._file.fileno())  # a new segment may begin meanwhile
        try:
            await asyncio.to_thread(os.fsync, descriptor)
        finally:
            os.close(descriptor)

    def cover(self, step: int, needed: int) -> None:
        """A checkpoint of `step` is complete: begin a new segment, and remove those that end before offset `needed`."""
        self.state.cover(step)
        os.fsync(self._file.fileno())
        state, base = _encoder.encode(self.state), self.offset
        self._file.close()
        self._open(self._patiently(lambda: begin_segment(self._directory, base, state)))
        for segment, following in pairwise(find_segments(self._directory)):
            if following.base < needed:
                segment.path.unlink()

    def batches_behind(self, step: int) -> list[RecordedBatch]:
        """All batches after `step`, even those let go: for a trainer that went back further than one checkpoint.

        Raises:
            CorruptData: the journal no longer reaches back so far.
        """
        return list(replay(self._directory, step)[0].batches.values())

    def close(self) -> None:
        self._file.close()

    def _patiently(self, write: Callable[[], T]) -> T:
        return self.patience.write("the journal", write) if self.patience else write()

    def _open(self, segment: Segment) -> None:
        self._file, self._base = segment.path.open("ab", buffering=0), segment.base


def replay(directory: Path, covered: int, upto: int | None = None) -> tuple[JournalState, int]:
    """The state at offset `upto`, or behind the last whole record, and all batches after step `covered`; its offset.

    Raises:
        SchemaMismatch, CorruptData: as `read_segments`, or the journal no longer reaches back to `covered`.
    """
    for records in _from_newest(directory, upto):
        state, end = next(records)
        if state.covered <= covered:
            break
    else:
        raise CorruptData(f"{directory} does not reach back to step {covered}; resume from a later checkpoint")
    state.cover(covered)
    for record, end in records:
        if not isinstance(record, JournalState):
            state.apply(record, end)
    return state, end


def read(directory: Path) -> Iterator[tuple[Record, int]]:
    """All records that are left, each with the offset behind it; the first sums up those that are gone.

    Raises:
        SchemaMismatch, CorruptData: as `read_segments`.
    """
    for payload, end in read_segments(find_segments(directory)):
        yield _decoder.decode(payload), end


def open_journal(role: Role, checkpoint: CheckpointManifest | None) -> Journal:
    """The journal of this start of the orchestrator.

    A new run begins one, and so does one that goes back to a checkpoint of another run (its `journal_offset` is 0). A
    later attempt goes on with all of it, unless it was told to go back to an older checkpoint; so does a later start
    within an attempt, whatever the attempt itself was told.
    """
    directory, attempt = role.paths.journal, role.plan.attempt
    covered, offset = (checkpoint.step, checkpoint.journal_offset) if checkpoint else (0, 0)
    known = (attempt > 1 or role.restart > 0) and bool(find_segments(directory))
    goes_back = known and role.plan.rewind and _last_attempt(directory) != attempt
    if not known or goes_back and not offset:
        journal = Journal.start(directory, attempt=attempt)
    else:
        journal = Journal.reopen(directory, covered, offset, rewind=goes_back, attempt=attempt)
    journal.patience = role.patience
    return journal


def _from_newest(directory: Path, upto: int | None) -> Iterator[Iterator[tuple[Any, int]]]:
    """Records from the beginning of each segment on, the newest first; none from where nothing lies before `upto`."""
    segments = [s for s in find_segments(directory) if upto is None or s.base < upto]
    for i in reversed(range(len(segments))):
        yield ((_decoder.decode(payload), end) for payload, end in read_segments(segments[i:], upto))


def _last_attempt(directory: Path) -> int:
    """The attempt that last opened a journal."""
    state, _ = next(next(_from_newest(directory, None)))
    return state.attempt
