"""Rollout records keep every token, its version and its log-probability."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prime_hpc.cluster.files import write_json
from prime_hpc.config.sections import MonitorConfig
from prime_hpc.errors import CorruptData, InfrastructureFailure
from prime_hpc.observe.preview import fates
from prime_hpc.observe.records import (
    OPTIONAL,
    BatchManifest,
    RolloutRecorder,
    read_batch,
    read_records,
    record_path,
    version_runs,
)
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, Failure, ImageSpan, PolicyVersion, Rollout, RolloutDone, Sample
from tests.unit.test_monitor import role

V1, V2 = PolicyVersion(0, 1).pack(), PolicyVersion(3, 2).pack()
MESSAGES = [{"role": "user", "content": "ab\nü"}, {"role": "assistant", "content": "ba"}]


def done(name: str, **fields) -> RolloutDone:
    sample = Sample(
        sample_id=f"{name}/0",
        source="words",
        token_ids=Array.of([7, 8, 9, 10], "i4"),
        mask=Array.of([0, 1, 1, 1], "bool"),
        logprobs=Array.of([0, -0.1, -0.2, -1e-7], "f4"),
        versions=Array.of([NOT_SAMPLED, V1, V1, V2], "i8"),
        temperature=0.5,
    )
    rollout = Rollout(rollout_id=name, source="words", task_id="t1", samples=[sample], **fields)
    return RolloutDone(worker="env-0", rollout=rollout, messages=json.dumps(MESSAGES))


def test_a_record_holds_what_was_sampled(tmp_path):
    recorder = RolloutRecorder(role(tmp_path), tmp_path / "rollouts")
    recorder.add(3, done("a", reward=0.5, rewards={"exact": 0.5}, metrics={"length": 2.0}, num_turns=1))
    recorder.flush(3)
    [record] = read_records(tmp_path / "rollouts" / "step_3.jsonl.zst")
    [sample] = record.pop("samples")
    assert {k: record[k] for k in ("step", "worker", "rollout_id", "source", "task_id", "reward", "failure")} == {
        "step": 3, "worker": "env-0", "rollout_id": "a", "source": "words", "task_id": "t1", "reward": 0.5,
        "failure": None,
    }  # fmt: skip
    assert (record["rewards"], record["metrics"], record["messages"]) == ({"exact": 0.5}, {"length": 2.0}, MESSAGES)
    assert np.array(sample.pop("logprobs"), np.float32).tolist() == np.float32([0, -0.1, -0.2, -1e-7]).tolist()
    assert sample == {
        "sample_id": "a/0",
        "trained": False,
        "adapter": "",
        "temperature": 0.5,
        "token_ids": [7, 8, 9, 10],
        "mask": [0, 1, 1, 1],
        "versions": [["0.1", 1, 3], ["3.2", 3, 4]],
        "images": [],
        **dict.fromkeys(OPTIONAL),
    }


def test_a_sample_that_trained_is_recorded_as_the_trainer_got_it(tmp_path):
    recorder = RolloutRecorder(role(tmp_path), tmp_path / "rollouts")
    sampled = done("a", reward=1.0)
    [sample] = sampled.rollout.samples
    trained = msgspec.structs.replace(sample, mask=Array.of([0, 0, 1, 1], "bool"),
                                      advantages=Array.of([0, 0, 0.5, 0.5], "f4"))  # fmt: skip
    recorder.add(1, sampled, {sample.sample_id: trained})
    recorder.flush(1)
    [record] = read_records(record_path(tmp_path / "rollouts", 1))
    assert (record["samples"][0]["mask"], record["samples"][0]["advantages"]) == ([0, 0, 1, 1], [0, 0, 0.5, 0.5])


def test_failures_are_records_too_and_order_is_kept(tmp_path):
    recorder = RolloutRecorder(role(tmp_path), tmp_path / "rollouts")
    recorder.add(1, done("a", reward=1.0))
    recorder.add(2, done("c", reward=1.0))
    recorder.add(1, done("b", failure=Failure(kind="environment", type="Timeout", message="600 s")))
    recorder.flush(1)
    records = list(read_records(record_path(tmp_path / "rollouts", 1)))
    assert [record["rollout_id"] for record in records] == ["a", "b"]
    assert records[1]["reward"] is None
    assert records[1]["failure"] == {"kind": "environment", "type": "Timeout", "message": "600 s"}
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step_1.jsonl.zst"]


def test_a_later_attempt_replaces_the_file_of_a_step(tmp_path):
    for name in ("old", "new"):
        recorder = RolloutRecorder(role(tmp_path), tmp_path / "rollouts")
        recorder.add(1, done(name, reward=1.0))
        recorder.flush(1)
    assert [r["rollout_id"] for r in read_records(record_path(tmp_path / "rollouts", 1))] == ["new"]


def test_a_fenced_attempt_writes_nothing(tmp_path):
    recorder = RolloutRecorder(role(tmp_path), tmp_path / "rollouts")
    recorder.add(1, done("a", reward=1.0))
    write_json(tmp_path / "rendezvous" / "lease.json", {"attempt": 2, "beat": 1.0})
    with pytest.raises(InfrastructureFailure, match="attempt 2 has taken over"):
        recorder.flush(1)
    assert not (tmp_path / "rollouts").exists()


@pytest.mark.parametrize(
    ("versions", "runs"),
    [([], []), ([NOT_SAMPLED], []), ([V1, V1, NOT_SAMPLED, V1], [("0.1", 0, 2), ("0.1", 3, 4)])],
)
def test_version_runs(versions, runs):
    assert version_runs(np.array(versions, dtype=np.int64)) == runs


def test_records_past_their_budget_are_removed_oldest_first(tmp_path: Path) -> None:
    owner = role(tmp_path, monitor=MonitorConfig(rollouts_gib=1e-9))
    recorder = RolloutRecorder(owner, tmp_path / "rollouts")
    for step in (8, 9, 10):
        recorder.flush(step)
    assert [path.name for path in (tmp_path / "rollouts").glob("step_*")] == ["step_10.jsonl.zst"]


def test_a_recorded_batch_is_the_batch_that_was_trained(tmp_path):
    recorder, rollouts = RolloutRecorder(role(tmp_path), tmp_path / "rollouts"), tmp_path / "rollouts"
    [sample] = done("a").rollout.samples
    images = {"d": b"\x89PNG\xff"}
    trained = msgspec.structs.replace(
        sample,
        images=[ImageSpan(1, 2, "d")],
        advantages=Array.of([0, 0.1, -0.3, 0], "f4"),
        ce_weights=Array.of([0.2, 0, 0, 0], "f4"),
    )
    recorder.add(1, done("a", reward=1.0, images=images), {sample.sample_id: trained})
    recorder.add(1, done("b", reward=0.0))
    manifest = BatchManifest(step=1, lineage=0, sample_ids=[sample.sample_id], journal_offset=7, lr=0.5)
    recorder.flush(1, manifest)
    assert read_batch(rollouts, 1) == (manifest, [trained], images)
    recorder.add(1, done("b", reward=0.0))
    recorder.flush(1, manifest)
    with pytest.raises(CorruptData, match="does not hold the samples"):
        read_batch(rollouts, 1)
    with pytest.raises(CorruptData, match="step_2.json is missing"):
        read_batch(rollouts, 2)


def test_every_token_of_a_record_shows_its_fate() -> None:
    sample = {
        "token_ids": [1, 2, 3, 4, 5, 6, 7],
        "mask": [0, 1, 1, 1, 1, 0, 0],
        "versions": [["0.0", 1, 6]],
        "advantages": [0, 1, -1, 0, 1, 0, 0],
        "rl_weights": [1, 1, 1, 1, 0, 1, 1],
        "ce_weights": [0, 0, 0, 0, 0, 0, 0.5],
        "ref_kl_weights": None,
        "trained": True,
    }
    assert fates(sample) == [
        "context", "pushed up", "pushed down", "no gradient", "no gradient", "left out", "learned",
    ]  # fmt: skip
    assert fates({**sample, "trained": False}) == ["context", *["left out"] * 5, "context"]
    teacher = {**sample, "versions": [], "advantages": None, "ce_weights": [0, 1, 1, 1, 1, 0, 0], "rl_weights": [0] * 7}
    assert fates(teacher) == ["context", *["learned"] * 4, "context", "context"]
