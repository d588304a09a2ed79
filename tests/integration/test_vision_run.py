"""Whole runs with images, on the fake engine and on real parts: vLLM, verifiers, FSDP2."""

import importlib.util
from pathlib import Path

import pytest

from prime_hpc.models.tiny_vision import IMAGE, VISION_END
from prime_hpc.observe.records import read_batch, read_records, record_path
from prime_hpc.transport.images import decode
from tests.integration.runs import ForkedRun, LocalRun
from tests.vision_support import SIDE, TOKEN

SQUARES = (
    "env.train=[{id: prime_hpc.envs.colour_row, sampling: {max_tokens: 6}, args: {colours: {r: red, g: lime, b: blue}, "
    "separator: '', min_len: 1, max_len: 3, side: 16, reward: similar, prompt: name}}]"
)


SEEING = ("max_steps=2", "model.renderer=qwen3-vl", "orchestrator.drop_zero_advantage=false", SQUARES)


def check_images(run: LocalRun, step: int) -> None:
    """Every sample of a recorded batch has the image that it was sampled behind."""
    _, samples, images = read_batch(run.root / "rollouts", step)
    for sample in samples:
        [image] = sample.images
        assert set(sample.token_ids.numpy()[image.start : image.stop].tolist()) == {TOKEN[IMAGE]}
        assert sample.token_ids.numpy()[image.stop] == TOKEN[VISION_END]
        assert decode(images[image.digest]).size == (SIDE * image.length, SIDE)
    assert len(images) < len(samples), "the rollouts of a group show one image"
    [content] = {record["messages"][0]["content"][0]["image_url"]["url"] in record["images"]
                 for record in read_records(record_path(run.root / "rollouts", step))}  # fmt: skip
    assert content is True


def test_images_go_from_the_environment_to_the_trainer_and_train_again_from_the_records(tmp_path, tiny_vision_model):
    run = ForkedRun(tmp_path, tiny_vision_model, "seeing", *SEEING)
    code, text = run.wait()
    assert code == 0, text
    assert run.summary["steps"] == 2
    check_images(run, 2)
    again = ForkedRun(tmp_path, tiny_vision_model, "again", "mode=replay", *SEEING,
                      f"trainer.replay.rollouts={run.root / 'rollouts'}")  # fmt: skip
    code, text = again.wait()
    assert code == 0, text
    for first, second in zip((row for row in run.metrics if "loss" in row), again.metrics, strict=True):
        assert {name: second[name] for name in ("loss", "entropy", "optim/grad_norm")} == {
            name: first[name] for name in ("loss", "entropy", "optim/grad_norm")
        }


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_what_was_sampled_before_images_is_trained_before_the_same_images(tmp_path: Path, tiny_vision_model) -> None:
    run = LocalRun(tmp_path, tiny_vision_model, "seeing", *SEEING, "inference.engine=tests.vision_engine",
                   "trainer.ranks=2", "model.freeze_vision=false", "optimizer.lr=1e-3",
                   "orchestrator.max_staleness=0",
                   "inference.vllm.max_num_seqs=16")  # fmt: skip
    code, text = run.wait(1800)
    assert code == 0, text
    assert run.summary["steps"] == 2
    for row in (row for row in run.metrics if "loss" in row):
        assert row["mismatch/tokens"] >= 20 and row["mismatch/abs_mean"] < 1e-4, "the trained tower was served, too"
    check_images(run, 2)
