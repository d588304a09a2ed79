"""One whole run on real parts: vLLM, verifiers, two FSDP2 ranks over gloo."""

import importlib.util
from pathlib import Path

import pytest

from prime_hpc.observe.records import read_records, record_path
from tests.integration.runs import LocalRun

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")


def test_a_run_on_real_parts_trains_what_was_sampled(tmp_path: Path, tiny_model: Path) -> None:
    run = LocalRun(tmp_path, tiny_model, "real", "max_steps=4", "inference.engine=prime_hpc.inference",
                   "trainer.ranks=2", "orchestrator.batch_size=32", "orchestrator.drop_zero_advantage=false",
                   "optimizer.lr=1e-3", "orchestrator.max_staleness=1",
                   "env.train.0.args.reward=similarity", "inference.vllm.max_num_seqs=32")  # fmt: skip
    code, text = run.wait(500)
    assert code == 0, text
    summary = run.summary
    assert summary["steps"] == 4
    assert summary["mismatch_tokens"] >= 100 and summary["mismatch_abs_mean"] < 1e-4
    rows = {r["step"]: r for r in run.metrics if "loss" in r}
    assert all(r["optim/skipped"] == 0 and r["batch/errors"] == 0 for r in rows.values())
    assert max(r["update/version"] for r in rows.values() if "update/version" in r) >= 2, "new weights were served"
    versions = {run_[0] for step in rows for record in read_records(record_path(run.root / "rollouts", step))
                for sample in record["samples"] for run_ in sample["versions"]}  # fmt: skip
    assert "0.0" in versions and len(versions) > 1, "tokens carry the version that sampled them"
    assert not run.survivors()
