"""A run on the fake engine: two sources with an adapter each, on a mixture of experts whose routing is replayed."""

import json
from collections import Counter
from pathlib import Path

from safetensors.torch import load_file

from prime_hpc.models.tiny import make_char_tokenizer
from prime_hpc.observe.records import read_records, record_path
from tests.integration.runs import ForkedRun
from tests.models_support import save_model

SOURCES = ("env.train=[{id: prime_hpc.envs.reverse_text, name: short, adapter: a, args: {min_len: 3, max_len: 4}}, "
           "{id: prime_hpc.envs.reverse_text, name: long, adapter: b, group_size: 2, "
           "order: {name: difficulty_pools}, args: {min_len: 5, max_len: 6, num_tasks: 50}}]")  # fmt: skip


def test_adapters_and_recorded_experts_reach_the_trainer(tmp_path: Path) -> None:
    """One group at a time, so that neither source is ahead of the other."""
    save_model("glm4_moe", tmp_path / "model")
    make_char_tokenizer(tmp_path / "model")
    engine = "inference.engine_args={skill0: 0.5, skill_per_version: 0, routing: [3, 8, 3]}"
    lora = ("lora.rank=2", "lora.adapters=[a,b]", "optimizer.lr=1e-3", "update.keep_versions=9")
    run = ForkedRun(tmp_path, tmp_path / "model", "tenants", "max_steps=2", engine, SOURCES, *lora,
                   "trainer.router_replay=true", "orchestrator.max_inflight=4",
                   "monitor.log_format=json")  # fmt: skip
    code, text = run.wait()
    assert code == 0, text
    records = [record for step in (1, 2) for record in read_records(record_path(run.root / "rollouts", step))]
    sizes = Counter((record["source"], record["rollout_id"].rpartition("-")[0]) for record in records)
    assert {(source, size) for (source, _), size in sizes.items()} == {("short", 4), ("long", 2)}
    steps = [row for row in run.metrics if "loss" in row]
    assert [row["moe/replayed"] for row in steps] == [1.0, 1.0]
    for name in ("entropy", "mismatch/abs_mean", "mismatch_kl", "is_masked"):
        assert {f"{name}/{source}" for source in ("short", "long")} <= {key for row in steps for key in row}
    for adapter in "ab":
        assert any(f"adapter/{adapter}/loss" in row for row in steps)
        files = [run.root / folder / adapter / "adapter_model.safetensors" for folder in ("weights/v0.0", "adapters")]
        first, last = map(load_file, files)
        assert any((tensor != first[name]).any() for name, tensor in last.items())
    lines = [json.loads(line) for line in run.log("orchestrator-0").splitlines() if line.startswith("{")]
    assert any(line["process"] == "orchestrator-0" and "is ready" in line["message"] for line in lines)
    assert all(sum(row[f"pools/long/{pool}"] for pool in ("unseen", "hard", "normal", "easy")) == 50 for row in steps)
    assert not (run.root / "model").exists()
