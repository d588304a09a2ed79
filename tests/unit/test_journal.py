"""The journal: replay to an offset, segments, cut tails, foreign files."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.cluster import patience
from prime_hpc.cluster.beats import Heart
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.orchestrator.journal import (
    BatchCut,
    GroupOpened,
    GroupsDropped,
    Journal,
    JournalState,
    Memory,
    RolloutFinished,
    open_journal,
    read,
)
from prime_hpc.orchestrator.segments import find_segments
from prime_hpc.transport.messages import PolicyVersion, Rollout, RolloutDone

V0 = PolicyVersion(0, 0)


def opened(group_id: str, draw: int) -> GroupOpened:
    return GroupOpened(group_id=group_id, source="words", draw=draw, task_index=draw * 10, version=V0)


def finished(group_id: str, rollout_id: str) -> RolloutFinished:
    rollout = Rollout(rollout_id=rollout_id, source="words", task_id="t", reward=1.0)
    return RolloutFinished(group_id=group_id, done=RolloutDone(worker="w", rollout=rollout, messages='["hi"]'))


def newest_file(journal: Path) -> Path:
    return find_segments(journal)[-1].path


def written(path: Path) -> tuple[Journal, int]:
    journal = Journal.start(path)
    for record in (opened("a", 0), opened("b", 1), finished("a", "a-0"), finished("b", "b-0")):
        journal.append(record)
    journal.append(BatchCut(step=1, lineage=0, group_ids=["a"], sample_ids=["a-0/0"]))
    return journal, journal.offset


def test_replay_returns_what_no_batch_has_taken(tmp_path: Path) -> None:
    journal, offset = written(tmp_path / "journal")
    journal.append(opened("c", 2))
    journal.close()
    state = Journal.reopen(tmp_path / "journal", 1, offset, rewind=True).state
    assert list(state.groups) == ["b"]
    assert state.groups["b"].opened.task_index == 10
    assert [d.rollout.rollout_id for d in state.groups["b"].done] == ["b-0"]
    assert state.groups["b"].done[0].messages == '["hi"]'
    assert state.draws == {"words": 2}, "the task drawn after the checkpoint is drawn again"
    assert state.step == 1


def test_replay_returns_the_memory_of_the_last_batch_and_what_each_was_made_with(tmp_path: Path) -> None:
    journal, _ = written(tmp_path / "journal")
    memories = [Memory(credit={"words": {"white": b}}, tasks={"mixture": {"words": -b}}) for b in (0.1, 0.3)]
    for step, memory in enumerate(memories, 2):
        journal.append(BatchCut(step=step, lineage=0, group_ids=[], sample_ids=[], memory=memory))
    journal.append(opened("c", 2))
    journal.close()
    state = Journal.reopen(tmp_path / "journal").state
    assert state.memory == memories[1]
    assert [state.batches[step].before for step in (1, 2, 3)] == [Memory(), Memory(), memories[0]]
    assert state.drawn == ["words"] and state.draws == {"words": 3}


def test_resuming_drops_what_lies_behind_the_offset(tmp_path: Path) -> None:
    journal, offset = written(tmp_path / "journal")
    journal.append(opened("c", 2))
    journal.close()
    resumed = Journal.reopen(tmp_path / "journal", 1, offset, rewind=True)
    assert [s.base for s in find_segments(tmp_path / "journal")] == [0, offset]
    resumed.append(opened("d", 2))
    resumed.close()
    assert resumed.state == Journal.reopen(tmp_path / "journal", 1).state
    ids = [r.group_id for r, _ in read(tmp_path / "journal") if isinstance(r, GroupOpened)]
    assert ids == ["a", "b", "d"]


@pytest.mark.parametrize("torn", [lambda data: data[:-3], lambda data: data[:-70] + bytes(70)])
def test_a_tail_cut_by_a_crash_is_not_a_record(torn: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)[0].close()
    whole = len(list(read(path)))
    newest_file(path).write_bytes(torn(newest_file(path).read_bytes()))
    assert len(list(read(path))) == whole - 1


def test_a_journal_shorter_than_the_checkpoint_wants_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, offset = written(path)
    journal.close()
    newest_file(path).write_bytes(newest_file(path).read_bytes()[:-3])
    with pytest.raises(CorruptData, match="0.bin was cut; resume=STEP"):
        Journal.reopen(path, 1, offset, rewind=True)


@pytest.mark.parametrize("rewind", [True, False])
def test_damage_in_the_middle_is_refused_and_not_taken_for_the_end(rewind: bool, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, offset = written(path)
    journal.close()
    data = bytearray(newest_file(path).read_bytes())
    data[data.index(b"GroupOpened") + 4] ^= 0xFF
    newest_file(path).write_bytes(bytes(data))
    with pytest.raises(CorruptData, match="damaged at byte"):
        Journal.reopen(path, 1, offset if rewind else 0, rewind=rewind)


def test_a_foreign_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.mkdir()
    (path / "0.bin").write_bytes(b"prime_hpc journal 999\n")
    with pytest.raises(SchemaMismatch, match="journal of schema"):
        Journal.reopen(path, 0, 10)


def test_going_on_keeps_what_lies_behind_the_offset_and_batches_without_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, offset = written(path)
    journal.append(BatchCut(step=2, lineage=0, group_ids=["b"], sample_ids=["b-0/0"]))
    second = journal.offset
    journal.append(opened("c", 2))
    journal.close()
    newest_file(path).write_bytes(newest_file(path).read_bytes() + b"torn")
    resumed = Journal.reopen(path, covered=1, offset=offset)
    (batch,) = resumed.state.batches.values()
    assert (batch.cut.step, batch.offset) == (2, second)
    assert [(g.opened.group_id, [d.rollout.rollout_id for d in g.done]) for g in batch.groups] == [("b", ["b-0"])]
    assert list(resumed.state.groups) == ["c"] and resumed.state.step == 2 and resumed.state.draws == {"words": 3}
    resumed.append(opened("d", 3))
    ids = [r.group_id for r, _ in read(path) if isinstance(r, GroupOpened)]
    assert ids == ["a", "b", "c", "d"], "what was torn is nowhere between the records"


def test_dropped_groups_do_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = written(path)
    journal.append(GroupsDropped(group_ids=["b"], reason="stale"))
    journal.close()
    state = Journal.reopen(path).state
    assert not state.groups and state.fates == {"trained": 1, "stale": 1}


def test_a_journal_that_lost_its_end_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, offset = written(path)
    journal.close()
    newest_file(path).write_bytes(newest_file(path).read_bytes()[:-3])
    with pytest.raises(CorruptData, match=f"the checkpoint wants {offset}: the journal was cut"):
        Journal.reopen(path, 1, offset)


def open_as(run_dir: Path, attempt: int, restart: int, checkpoint: SimpleNamespace | None, rewind: bool) -> Journal:
    plan = SimpleNamespace(attempt=attempt, rewind=rewind)
    return open_journal(SimpleNamespace(paths=RunPaths(run_dir), plan=plan, restart=restart, patience=None), checkpoint)


def test_an_attempt_goes_back_once_and_its_restarts_go_on(tmp_path: Path) -> None:
    first = open_as(tmp_path, 1, 0, None, rewind=False)
    for record in (opened("a", 0), finished("a", "a-0")):
        first.append(record)
    first.append(BatchCut(step=1, lineage=0, group_ids=["a"], sample_ids=["a-0/0"]))
    checkpoint = SimpleNamespace(step=1, journal_offset=first.offset)
    first.append(opened("b", 1))
    first.close()
    again = open_as(tmp_path, 1, 1, None, rewind=False)
    assert list(again.state.groups) == ["b"] and list(again.state.batches) == [1]
    again.close()
    back = open_as(tmp_path, 2, 0, checkpoint, rewind=True)
    assert not back.state.groups and not back.state.batches
    back.append(opened("c", 1))
    back.close()
    restarted = open_as(tmp_path, 2, 1, checkpoint, rewind=True)
    assert list(restarted.state.groups) == ["c"], "what the attempt has done since is kept"


def cut(journal: Journal, step: int) -> int:
    """Open a group, let it end, make it batch `step` with a memory of its own; returns the offset behind."""
    journal.append(opened(f"g{step}", step))
    journal.append(finished(f"g{step}", f"g{step}-0"))
    memory = Memory(credit={"words": {"white": step / 2}}, tasks={"mixture": {"words": -step}})
    batch = BatchCut(step=step, lineage=0, group_ids=[f"g{step}"], sample_ids=[f"g{step}-0/0"], memory=memory)
    journal.append(batch)
    return journal.offset


@pytest.fixture
def long(tmp_path: Path) -> tuple[Path, dict[int, int]]:
    """Six batches and their offsets; checkpoints 2 and 4 were noted one batch later, and that of step 2 is kept."""
    path = tmp_path / "journal"
    journal, offsets = Journal.start(path), {}
    for step in range(1, 7):
        offsets[step] = cut(journal, step)
        if step in (3, 5):
            journal.cover(step - 1, needed=offsets[2])
    journal.append(opened("open", 7))
    journal.close()
    return path, offsets


def test_a_segment_begins_with_all_that_earlier_ones_left(long: tuple[Path, dict[int, int]]) -> None:
    path, offsets = long
    assert [s.base for s in find_segments(path)] == [0, offsets[3], offsets[5]]
    whole = Journal.reopen(path, covered=4)
    for segment in find_segments(path)[:2]:
        segment.path.unlink()
    find_segments(path)[-1].path.unlink()
    alone = Journal.reopen(path, covered=4)
    assert alone.state == whole.state
    assert list(alone.state.batches) == [5, 6] and list(alone.state.groups) == ["open"]
    assert alone.state.fates == {"trained": 6} and alone.state.draws == {"words": 8}


def test_segments_that_no_kept_checkpoint_needs_are_removed(long: tuple[Path, dict[int, int]]) -> None:
    path, offsets = long
    journal = Journal.reopen(path, covered=4)
    journal.cover(6, needed=offsets[4])
    assert [s.base for s in find_segments(path)][:2] == [offsets[3], offsets[5]]
    first, _ = next(read(path))
    assert isinstance(first, JournalState) and first.fates == {"trained": 3}


def test_a_trainer_that_goes_back_further_gets_the_batches_from_older_segments(
    long: tuple[Path, dict[int, int]],
) -> None:
    path, _ = long
    journal = Journal.reopen(path, covered=4)
    assert [b.cut.step for b in journal.batches_behind(2)] == [3, 4, 5, 6]
    assert list(Journal.reopen(path, covered=2).state.batches) == [3, 4, 5, 6]
    find_segments(path)[0].path.unlink()
    with pytest.raises(CorruptData, match="does not reach back to step 1; resume from a later checkpoint"):
        journal.batches_behind(1)


def test_going_back_removes_the_segments_behind(long: tuple[Path, dict[int, int]]) -> None:
    path, offsets = long
    journal = Journal.reopen(path, 2, offsets[2], rewind=True)
    assert [s.base for s in find_segments(path)] == [0, offsets[2]]
    assert journal.state.step == 2 and not journal.state.batches and journal.state.draws == {"words": 3}


def test_a_segment_that_was_cut_is_refused(long: tuple[Path, dict[int, int]]) -> None:
    path, _ = long
    segment = find_segments(path)[1].path
    segment.write_bytes(segment.read_bytes()[:-2])
    assert Journal.reopen(path, covered=4).state.step == 6, "it is not read"
    with pytest.raises(CorruptData, match=f"{segment.name} was cut"):
        Journal.reopen(path, covered=2)


def test_what_a_process_that_was_fenced_off_still_writes_reaches_nobody(tmp_path: Path) -> None:
    fenced = open_as(tmp_path, 1, 0, None, rewind=False)
    fenced.append(opened("a", 0))
    newer = open_as(tmp_path, 2, 0, None, rewind=False)
    fenced.append(opened("lost", 1))
    newer.append(opened("b", 1))
    assert list(open_as(tmp_path, 2, 1, None, rewind=False).state.groups) == ["a", "b"]


def test_a_run_that_goes_back_to_a_checkpoint_of_another_begins_a_journal(tmp_path: Path) -> None:
    first = open_as(tmp_path, 1, 0, None, rewind=False)
    cut(first, 1)
    first.close()
    journal = open_as(tmp_path, 2, 0, SimpleNamespace(step=12, journal_offset=0), rewind=True)
    assert journal.state == JournalState(attempt=2)


def test_records_and_segments_wait_for_space(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.05)
    journal = Journal.start(small_disk / "journal")
    journal.patience = patience.Patience(30.0, Heart(tmp_path, "orchestrator-0", 1, 0, 1.0), logging.getLogger("t"))
    large = "g" * 10_000
    for act in (lambda: journal.append(opened(large, 0)), lambda: journal.cover(1, needed=0)):
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        threading.Timer(0.3, filler.unlink).start()
        act()
        assert "the journal cannot be written: [Errno 28] No space left on device; free space" in caplog.text
        caplog.clear()
    journal.close()
    assert list(Journal.reopen(small_disk / "journal", covered=1).state.groups) == [large]
