"""The trainer role on recorded batches: weights, reports, checkpoints, resume and what happens when things break."""

import json
import math
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_hpc.errors import CorruptData, InfrastructureFailure
from prime_hpc.plan.run_plan import Fork
from prime_hpc.transport import checkpoints
from prime_hpc.transport.weights import published_versions, verify
from tests.trainer_support import make_run


def state(run) -> dict:
    return json.loads((run.paths.rendezvous / "trainer-0.json").read_text())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_publishes_every_version_and_ends_with_a_checkpoint_and_a_model(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, max_steps=3, update={"keep_versions": 9}).record(3).train()
    assert [str(v) for v in published_versions(run.paths.weights)] == ["0.0", "0.1", "0.2", "0.3"]
    assert same(run.weights("0.0"), load_file(tiny_model / "model.safetensors"))
    assert not same(run.weights("0.1"), run.weights("0.0"))
    manifest = checkpoints.verify(run.paths.checkpoint(3))
    assert (manifest.step, manifest.lineage, manifest.world, manifest.journal_offset) == (3, 0, 1, 300)
    assert (state(run)["state"], state(run)["step"]) == ("trained", 3)
    assert state(run)["checkpoint"] == str(run.paths.checkpoint(3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model.lm_head.weight, run.weights("0.3")["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<eos>"


def test_reports_hold_what_a_step_measured(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, max_steps=2).record(2).train()
    report = run.report(2)
    assert report.step == 2
    metrics = report.metrics
    assert metrics["optim/lr"] == 1e-3
    assert metrics["optim/skipped"] == 0
    assert metrics["mismatch/tokens"] > 20
    assert 0 < metrics["mismatch/abs_mean"] < 1
    assert metrics["entropy"] == pytest.approx(math.log(32), abs=0.2)
    times = ("wait_for_batch", "forward_backward", "optimizer", "publish", "checkpoint", "step")
    assert {f"time/{t}" for t in times} | {"loss", "optim/grad_norm", "mismatch_kl", "perf/tokens_per_s",
                                           "perf/peak_memory_gib", "tokens/trained"} <= metrics.keys()  # fmt: skip


def test_old_versions_go_once_every_engine_has_passed_them(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, max_steps=4).record(4)
    (run.paths.rendezvous / "acks" / "inference-0.rank0.json").write_text('{"version": "0.1"}')
    (run.paths.weights / ".v0.9.partial").mkdir()
    run.train()
    assert sorted(p.name for p in run.paths.weights.iterdir()) == ["v0.1", "v0.2", "v0.3", "v0.4"]


def test_a_resumed_run_takes_bitwise_the_same_steps(tmp_path, tiny_model):
    whole = make_run(tmp_path / "whole", tiny_model, max_steps=4).record(4).train()
    halves = {"max_steps": 4, "checkpoint": {"every": 2}, "update": {"keep_versions": 9}}
    first = make_run(tmp_path / "run", tiny_model, **halves | {"max_steps": 2}).record(2).train()
    resumed = make_run(tmp_path / "run", tiny_model, attempt=2, checkpoint_path=first.paths.checkpoint(2),
                       forks=[Fork(lineage=1, step=2)], **halves).record(4).train()  # fmt: skip
    assert same(resumed.weights("1.4"), whole.weights("0.4"))
    assert same(resumed.weights("1.2"), first.weights("0.2"))
    assert checkpoints.verify(resumed.paths.checkpoint(4)).lineage == 1
    assert resumed.report(4).metrics["loss"] == whole.report(4).metrics["loss"]


def test_ranks_that_come_back_to_a_checkpoint_hand_over_what_its_step_measured(tmp_path, tiny_model):
    first = make_run(tmp_path, tiny_model, max_steps=2, checkpoint={"every": 1}).record(2, poison=1).train()
    measured = first.report(2).metrics
    again = make_run(tmp_path, tiny_model, attempt=2, checkpoint_path=first.paths.checkpoint(2), max_steps=2)
    (first.paths.batches / "step_3" / "request_0.bin").unlink()
    assert again.train().report(2).metrics == pytest.approx(measured, rel=0, abs=0, nan_ok=True)
    assert checkpoints.read_manifest(first.paths.checkpoint(1)).report["loss"] is None, "it was not finite"


def test_saving_does_not_disturb_training(tmp_path, tiny_model):
    plain = make_run(tmp_path / "plain", tiny_model, max_steps=3).record(3).train()
    saving = make_run(tmp_path / "saving", tiny_model, max_steps=3, checkpoint={"every": 1, "keep_last": 1})
    saving.record(3).train()
    assert same(saving.weights("0.3"), plain.weights("0.3"))
    assert checkpoints.complete_steps(saving.paths.checkpoints) == [3]


def test_two_ranks_train_like_one_and_their_checkpoint_resumes_on_one(tmp_path, tiny_model):
    one = make_run(tmp_path / "one", tiny_model, max_steps=3).record(3).train()
    two = make_run(tmp_path / "two", tiny_model, ranks=2, max_steps=2).record(2).train_in_forks()
    for name, tensor in two.weights("0.2").items():
        torch.testing.assert_close(tensor, one.weights("0.2")[name], rtol=0, atol=1e-6)
    for metric in ("loss", "entropy", "optim/grad_norm", "mismatch_kl", "tokens/trained"):
        assert two.report(2).metrics[metric] == pytest.approx(one.report(2).metrics[metric], rel=1e-4), metric
    resumed = make_run(tmp_path / "two", tiny_model, attempt=2, checkpoint_path=two.paths.checkpoint(2), max_steps=3)
    resumed.record(3).train()
    assert resumed.report(3).metrics["loss"] == pytest.approx(one.report(3).metrics["loss"], abs=1e-6)
    for name, tensor in resumed.weights("0.3").items():
        torch.testing.assert_close(tensor, one.weights("0.3")[name], rtol=0, atol=2e-6)


def test_a_step_that_is_not_finite_is_skipped_and_its_version_published(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, max_steps=3).record(3, poison=2).train()
    assert same(run.weights("0.2"), run.weights("0.3")) is False
    assert run.report(2).metrics["optim/skipped"] == 1
    assert math.isnan(run.report(2).metrics["loss"])
    assert run.report(3).metrics["optim/skipped"] == 1


def test_skipped_weights_are_those_of_the_version_before(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, max_steps=2).record(2, poison=2).train()
    assert same(run.weights("0.2"), run.weights("0.1"))
    assert verify(run.paths.weights_version("0.2")).version == "0.2"


def test_too_many_skipped_steps_stop_the_run(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, max_steps=2, trainer={"max_skipped_steps": 0}).record(2, poison=1)
    with pytest.raises(InfrastructureFailure, match="1 steps in a row up to step 1"):
        run.train()


def test_a_damaged_checkpoint_is_refused_by_file(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, max_steps=1).record(1).train()
    shard = next(run.paths.checkpoint(1).glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    resumed = make_run(tmp_path, tiny_model, attempt=2, checkpoint_path=run.paths.checkpoint(1), max_steps=2)
    with pytest.raises(CorruptData, match=rf"step_1/{shard.name} does not match its digest"):
        resumed.train()


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(tmp_path, small_disk, tiny_model, caplog):
    run = make_run(tmp_path / "run", tiny_model, max_steps=5, checkpoint={"every": 2, "keep_last": 1}).record(5)
    run.paths.checkpoints.rmdir()
    run.paths.checkpoints.symlink_to(small_disk)
    with pytest.raises(InfrastructureFailure, match="checkpoint 5 .*No space left.*newest complete .* step 2"):
        run.train()
    ours = [record for record in caplog.records if record.name == "trainer-0"]
    errors = [record.message for record in ours if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "checkpoint 4 could not be written" in errors[0] and "No space left" in errors[0]
    assert verify(run.paths.weights_version("0.5"))
    assert sorted(p.name for p in small_disk.iterdir()) == ["step_2"]
    assert checkpoints.verify(run.paths.checkpoint(2)).step == 2


def test_a_read_only_file_system_ends_the_run_and_keeps_the_last_checkpoint(tmp_path, small_disk, tiny_model):
    settings = {"checkpoint": {"every": 2, "keep_last": 1}}
    first = make_run(tmp_path / "run", tiny_model, max_steps=2, **settings).record(4)
    first.paths.checkpoints.rmdir()
    first.paths.checkpoints.symlink_to(small_disk)
    first.train()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = make_run(tmp_path / "run", tiny_model, attempt=2, checkpoint_path=first.paths.checkpoint(2), max_steps=4,
                   **settings)  # fmt: skip
    with pytest.raises(OSError, match="Read-only file system"):
        run.train()
    assert checkpoints.verify(run.paths.checkpoint(2)).step == 2


def test_a_fenced_attempt_announces_no_weights(tmp_path, tiny_model):
    run = make_run(tmp_path, tiny_model, max_steps=1).record(1)
    with pytest.raises(InfrastructureFailure, match="attempt 2 has taken over from attempt 1"):
        run.train(lease=2)
    assert published_versions(run.paths.weights) == []
