"""The journal: replay to an offset, cut tails, foreign files."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.orchestrator.journal import (
    BatchCut,
    GroupOpened,
    GroupsDropped,
    Journal,
    Memory,
    RolloutFinished,
    open_journal,
    read,
)
from prime_hpc.transport.messages import PolicyVersion, Rollout, RolloutDone

V0 = PolicyVersion(0, 0)


def opened(group_id: str, draw: int) -> GroupOpened:
    return GroupOpened(group_id=group_id, source="words", draw=draw, task_index=draw * 10, version=V0)


def finished(group_id: str, rollout_id: str) -> RolloutFinished:
    rollout = Rollout(rollout_id=rollout_id, source="words", task_id="t", reward=1.0)
    return RolloutFinished(group_id=group_id, done=RolloutDone(worker="w", rollout=rollout, messages='["hi"]'))


def written(path: Path) -> tuple[Journal, int]:
    journal = Journal.start(path)
    for record in (opened("a", 0), opened("b", 1), finished("a", "a-0"), finished("b", "b-0")):
        journal.append(record)
    journal.append(BatchCut(step=1, lineage=0, group_ids=["a"], sample_ids=["a-0/0"]), durable=True)
    return journal, journal.offset


def test_replay_returns_what_no_batch_has_taken(tmp_path: Path) -> None:
    journal, offset = written(tmp_path / "journal.bin")
    journal.append(opened("c", 2))
    journal.close()
    state = Journal.reopen(tmp_path / "journal.bin", 1, offset, rewind=True).state
    assert list(state.groups) == ["b"]
    assert state.groups["b"].opened.task_index == 10
    assert [d.rollout.rollout_id for d in state.groups["b"].done] == ["b-0"]
    assert state.groups["b"].done[0].messages == '["hi"]'
    assert state.draws == {"words": 2}, "the task drawn after the checkpoint is drawn again"
    assert state.step == 1


def test_replay_returns_the_memory_of_the_last_batch_and_what_each_was_made_with(tmp_path: Path) -> None:
    journal, _ = written(tmp_path / "journal.bin")
    memories = [Memory(credit={"words": {"white": b}}, tasks={"mixture": {"words": -b}}) for b in (0.1, 0.3)]
    for step, memory in enumerate(memories, 2):
        journal.append(BatchCut(step=step, lineage=0, group_ids=[], sample_ids=[], memory=memory))
    journal.append(opened("c", 2))
    journal.close()
    state = Journal.reopen(tmp_path / "journal.bin").state
    assert state.memory == memories[1]
    assert [state.batches[step].before for step in (1, 2, 3)] == [Memory(), Memory(), memories[0]]
    assert state.drawn == ["words"] and state.draws == {"words": 3}


def test_resuming_drops_what_lies_behind_the_offset(tmp_path: Path) -> None:
    journal, offset = written(tmp_path / "journal.bin")
    journal.append(opened("c", 2))
    journal.close()
    resumed = Journal.reopen(tmp_path / "journal.bin", 1, offset, rewind=True)
    assert resumed.offset == offset
    resumed.append(opened("d", 2))
    resumed.close()
    ids = [r.group_id for r, _ in read(tmp_path / "journal.bin") if isinstance(r, GroupOpened)]
    assert ids == ["a", "b", "d"]


def test_a_tail_cut_by_a_crash_is_not_a_record(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    written(path)[0].close()
    whole = len(list(read(path)))
    path.write_bytes(path.read_bytes()[:-3])
    assert len(list(read(path))) == whole - 1


def test_a_journal_shorter_than_the_checkpoint_wants_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal, offset = written(path)
    journal.close()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptData, match="the journal was cut"):
        Journal.reopen(path, 1, offset, rewind=True)


def test_damage_before_the_offset_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal, offset = written(path)
    journal.close()
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptData, match="damaged at byte"):
        Journal.reopen(path, 1, offset, rewind=True)


def test_a_foreign_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    path.write_bytes(b"prime_hpc journal 999\n")
    with pytest.raises(SchemaMismatch, match="journal of schema"):
        Journal.reopen(path, 0, 10)


def test_going_on_keeps_what_lies_behind_the_offset_and_batches_without_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal, offset = written(path)
    journal.append(BatchCut(step=2, lineage=0, group_ids=["b"], sample_ids=["b-0/0"]), durable=True)
    second = journal.offset
    journal.append(opened("c", 2))
    journal.close()
    path.write_bytes(path.read_bytes() + b"torn")
    resumed = Journal.reopen(path, covered=1, offset=offset)
    (batch,) = resumed.state.batches.values()
    assert (batch.cut.step, batch.offset) == (2, second)
    assert [(g.opened.group_id, [d.rollout.rollout_id for d in g.done]) for g in batch.groups] == [("b", ["b-0"])]
    assert list(resumed.state.groups) == ["c"] and resumed.state.step == 2 and resumed.state.draws == {"words": 3}
    assert path.read_bytes()[-4:] != b"torn"


def test_dropped_groups_do_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal, _ = written(path)
    journal.append(GroupsDropped(group_ids=["b"], reason="stale"))
    journal.close()
    state = Journal.reopen(path).state
    assert not state.groups and state.dropped == {"b": "stale"}


def test_a_journal_that_lost_its_end_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal, offset = written(path)
    journal.close()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptData, match=f"the checkpoint wants {offset}: the journal was cut"):
        Journal.reopen(path, 1, offset)


def open_as(run_dir: Path, attempt: int, restart: int, checkpoint: SimpleNamespace | None, rewind: bool) -> Journal:
    plan = SimpleNamespace(attempt=attempt, rewind=rewind)
    return open_journal(SimpleNamespace(paths=RunPaths(run_dir), plan=plan, restart=restart, patience=None), checkpoint)


def test_an_attempt_goes_back_once_and_its_restarts_go_on(tmp_path: Path) -> None:
    first = open_as(tmp_path, 1, 0, None, rewind=False)
    for record in (opened("a", 0), finished("a", "a-0")):
        first.append(record)
    first.append(BatchCut(step=1, lineage=0, group_ids=["a"], sample_ids=["a-0/0"]), durable=True)
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
