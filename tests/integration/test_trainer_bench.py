"""The bench of the trainer."""

from pathlib import Path

from tests.integration.runs import RunDirectory, launch_forked

SMALL = ("num_hidden_layers=2", "hidden_size=32", "intermediate_size=48", "num_attention_heads=4",
         "num_key_value_heads=2", "head_dim=8", "vocab_size=64")  # fmt: skip


def launch(tmp_path: Path, *overrides: str) -> tuple[int, str]:
    return launch_forked(tmp_path / "said", "+experiment=bench_trainer", f"run.output_dir={tmp_path}",
                         "run.name=bench", "launcher.live=false", "trainer.device=cpu", "trainer.compile=false",
                         "trainer.dtype=float32", *overrides)  # fmt: skip


def test_two_ranks_measure_a_shape_without_weights(tmp_path):
    code, said = launch(tmp_path, "trainer.ranks=2", "max_steps=4", "seq_len=16", "trainer.micro_batch_tokens=32",
                        *(f"model.shape.{item}" for item in SMALL))  # fmt: skip
    assert code == 0, said
    summary = RunDirectory(tmp_path / "bench").summary
    assert (summary["ranks"], summary["tokens"], summary["model"]) == (2, 64, "qwen3")
    assert summary["tokens_per_s"] > 0


def test_mistakes_are_reported_together(tmp_path):
    code, said = launch(tmp_path, "mode=sft", "trainer.fp8=true", "trainer.micro_batch_tokens=8")
    assert code == 2
    for problem in ("model.shape", "trainer.sft.data", "trainer.fp8"):
        assert f"{problem} = " in said


def test_a_rank_says_what_it_lacks_without_a_traceback(tmp_path):
    code, said = launch(tmp_path, "max_steps=2", "trainer.bench.warmup=1", "seq_len=16",
                        "trainer.micro_batch_tokens=32", "trainer.fp8=true", "trainer.dtype=bfloat16",
                        *(f"model.shape.{item}" for item in SMALL))  # fmt: skip
    assert code == 1, said
    assert "trainer.fp8 = True: expected false, or" in said and "Traceback" not in said
