"""The bench of engines, on two fake engines."""

from pathlib import Path

import pytest

from tests.integration.runs import RunDirectory, launch_forked


@pytest.mark.parametrize("route", ["completions", "generate"])
def test_a_fleet_is_measured_at_each_concurrency(tmp_path: Path, tiny_model: Path, route: str) -> None:
    code, said = launch_forked(
        tmp_path / "said", "+experiment=bench_inference", f"model.path={tiny_model}", f"run.output_dir={tmp_path}",
        "run.name=bench", "launcher.live=false", "seq_len=64", "inference.engine=tests.fake_engine",
        "inference.engine_args={kv_tokens: 4096, token_s: 0.001}", "inference.replicas=2",
        f"inference.bench.route={route}", "inference.bench.concurrency=[1,4]", "inference.bench.prompt_tokens=16",
        "inference.bench.reply_tokens=16")  # fmt: skip
    assert code == 0, said
    run = RunDirectory(tmp_path / "bench")
    assert (run.summary["replicas"], run.summary["route"], run.summary["model"]) == (2, route, str(tiny_model))
    one, four = run.summary["levels"]
    assert (one["concurrency"], one["requests"], four["concurrency"], four["requests"]) == (1, 4, 4, 16)
    assert four["tokens_per_s"] > 0 and 0 <= four["kv_usage"] <= 1 and four["prefix_hit_rate"] is None
    assert (one["first_token_s"] is None) == (route == "generate")
    assert (run.root / "bench.txt").read_text() in said
