"""One whole run with images on real parts: vLLM, verifiers, FSDP2."""

import importlib.util
from pathlib import Path

import pytest

from prime_hpc.observe.records import read_batch
from tests.integration.runs import LocalRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
SQUARES = (
    "env.train=[{id: prime_hpc.envs.colour_row, sampling: {max_tokens: 6}, args: {colours: {r: red, g: lime, b: blue}, "
    "separator: '', min_len: 1, max_len: 3, side: 16, reward: similar, prompt: name}}]"
)


def test_what_was_sampled_before_images_is_trained_before_the_same_images(tmp_path: Path, tiny_vision_model) -> None:
    run = LocalRun(tmp_path, tiny_vision_model, "seeing", "max_steps=2", "inference.engine=tests.vision_engine",
                   "trainer.ranks=2", "model.renderer=qwen3-vl", "model.freeze_vision=false",
                   "orchestrator.drop_zero_advantage=false", "optimizer.lr=1e-3", SQUARES,
                   "inference.vllm.max_num_seqs=16")  # fmt: skip
    code, text = run.wait(900)
    assert code == 0, text
    assert run.summary["steps"] == 2
    assert run.summary["mismatch_tokens"] >= 100 and run.summary["mismatch_abs_mean"] < 1e-4
    _, samples, images = read_batch(run.root / "rollouts", 2)
    assert all(len(sample.images) == 1 for sample in samples)
    assert {image.digest for sample in samples for image in sample.images} <= images.keys()
    assert len(images) < len(samples), "the rollouts of a group show one image"
