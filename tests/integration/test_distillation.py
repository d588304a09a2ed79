"""Teachers and references in one run: every source has an algorithm of its own, and all train in one batch."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from prime_hpc.observe.records import read_records, record_path
from tests.integration.runs import ForkedRun, LocalRun

WORDS = "id: prime_hpc.envs.reverse_text, sampling: {max_tokens: 14}"
SOURCES = ("env.train=["
           f"{{{WORDS}, name: scored, algorithm: {{name: opd, teacher: teacher}}}},"
           f"{{{WORDS}, name: taught, algorithm: {{name: sft, teacher: teacher}}}},"
           f"{{{WORDS}, name: shown, algorithm: {{name: opsd, demonstration: answer, role: user,"
           " template: '{demonstration}'}},"
           f"{{{WORDS}, name: pulled}}]")  # fmt: skip
COMMON = (
    SOURCES, "loss.ref_tau=0.1", "loss.reference=teacher", "inference.vllm.max_model_len=128",
    "orchestrator.drop_zero_advantage=false", "orchestrator.max_staleness=0",
)  # fmt: skip


def teacher(model: Path) -> str:
    return f"frozen={{teacher: {{path: {model}, engine_args: {{skill0: 1.0}}}}}}"


def test_sources_learn_from_rewards_teachers_and_demonstrations_at_once(tmp_path: Path, tiny_model: Path) -> None:
    run = ForkedRun(tmp_path, tiny_model, "taught", "max_steps=2", teacher(tiny_model), *COMMON,
                   "inference.engine_args={skill0: 0.4, skill_per_version: 0}")  # fmt: skip
    code, text = run.wait(600)
    assert code == 0, text
    records = []
    for step in (1, 2):
        records += (batch := list(read_records(record_path(run.root / "rollouts", step))))
        assert {r["source"] for r in batch} == {"scored", "taught", "shown", "pulled"}
    taught = [r for r in records if r["source"] == "taught"]
    assert all(r["reward"] == 1.0 and not r["samples"][0]["versions"] for r in taught), "the teacher always knows"
    assert any(r["reward"] == 0.0 for r in records), "the policy does not"
    for record in records:
        (sample,) = record["samples"]
        ids, scores = np.array(sample["token_ids"]), sample["ref_logprobs"]
        hint = len(record["task_id"].partition("-")[2]) + 1 if record["source"] == "shown" else 0
        expected = -(1 + (ids + np.arange(len(ids)) + hint) % 8) / 8
        if record["source"] == "taught":
            assert scores is None
        else:
            assert scores[1:] == expected[1:].tolist(), "each token under the reference, behind the hint"
    rows = {r["step"]: r for r in run.metrics if "loss" in r}
    for row in rows.values():
        assert {"nll", "ref_kl", "reference/kl", "is_masked"} <= set(row)
        assert row["optim/skipped"] == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_on_real_parts_the_policy_is_its_own_reference_at_first(tmp_path: Path, tiny_model: Path) -> None:
    run = LocalRun(tmp_path, tiny_model, "real", "max_steps=2", teacher(tiny_model), *COMMON,
                   "inference.engine=prime_hpc.inference", "inference.vllm.max_num_seqs=32")  # fmt: skip
    code, text = run.wait(900)
    assert code == 0, text
    records = [r for r in read_records(record_path(run.root / "rollouts", 1)) if r["source"] in ("scored", "pulled")]
    assert records
    for record in records:
        (sample,) = record["samples"]
        sampled = np.array(sample["mask"], dtype=bool)
        assert [version for version, *_ in sample["versions"]] == ["0.0"]
        np.testing.assert_allclose(np.array(sample["ref_logprobs"])[sampled], np.array(sample["logprobs"])[sampled],
                                   atol=1e-4)  # fmt: skip
