"""The journal: replay to an offset, cut tails, foreign files."""

from pathlib import Path

import pytest

from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.orchestrator.journal import BatchCut, GroupOpened, Journal, Memory, RolloutFinished, read
from prime_hpc.transport.messages import PolicyVersion, Rollout, RolloutDone

V0 = PolicyVersion(0, 0)


def opened(group_id: str, draw: int) -> GroupOpened:
    return GroupOpened(group_id=group_id, source="words", draw=draw, task_index=draw * 10, version=V0)


def finished(group_id: str, rollout_id: str) -> RolloutFinished:
    rollout = Rollout(rollout_id=rollout_id, source="words", task_id="t", reward=1.0)
    return RolloutFinished(group_id=group_id, done=RolloutDone(worker="w", rollout=rollout, messages='["hi"]'))


def written(path: Path) -> tuple[Journal, int]:
    journal = Journal(path)
    for record in (opened("a", 0), opened("b", 1), finished("a", "a-0"), finished("b", "b-0")):
        journal.append(record)
    journal.append(BatchCut(step=1, group_ids=["a"], sample_ids=["a-0/0"]), durable=True)
    return journal, journal.offset


def test_replay_returns_what_no_batch_has_taken(tmp_path: Path) -> None:
    journal, offset = written(tmp_path / "journal.bin")
    journal.append(opened("c", 2))
    journal.close()
    state = Journal(tmp_path / "journal.bin", upto=offset).state
    assert list(state.groups) == ["b"]
    assert state.groups["b"].task_index == 10
    assert [d.rollout.rollout_id for d in state.rollouts["b"]] == ["b-0"]
    assert state.rollouts["b"][0].messages == '["hi"]'
    assert state.draws == {"words": 2}, "the task drawn after the checkpoint is drawn again"
    assert state.step == 1


def test_replay_returns_the_memory_of_the_last_batch(tmp_path: Path) -> None:
    journal, _ = written(tmp_path / "journal.bin")
    assert Journal(tmp_path / "journal.bin", upto=journal.offset).state.memory == Memory()
    memories = [
        Memory(credit={"words": {"white": share}}, tasks={"mixture": {"words": -share}}) for share in (0.1, 0.3)
    ]
    for step, memory in enumerate(memories, 2):
        journal.append(BatchCut(step=step, group_ids=[], sample_ids=[], memory=memory))
    assert Journal(tmp_path / "journal.bin", upto=journal.offset).state.memory == memories[1]


def test_resuming_drops_what_lies_behind_the_offset(tmp_path: Path) -> None:
    journal, offset = written(tmp_path / "journal.bin")
    journal.append(opened("c", 2))
    journal.close()
    resumed = Journal(tmp_path / "journal.bin", upto=offset)
    assert resumed.offset == offset
    resumed.append(opened("d", 2))
    resumed.close()
    ids = [r.group_id for r in read(tmp_path / "journal.bin") if isinstance(r, GroupOpened)]
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
        Journal(path, upto=offset)


def test_damage_before_the_offset_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal, offset = written(path)
    journal.close()
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptData, match="damaged at byte"):
        Journal(path, upto=offset)


def test_a_foreign_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    path.write_bytes(b"prime_hpc journal 999\n")
    with pytest.raises(SchemaMismatch, match="journal of schema"):
        Journal(path, upto=10)
