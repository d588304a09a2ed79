"""A model that sees over two ranks, of which one has the images of a step and the other none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3VLForConditionalGeneration

from prime_hpc.transport.messages import Sample
from tests.trainer_support import TrainerRun, make_run
from tests.vision_support import make_png, make_sample

IMAGE = make_png(3, 2)


def samples(step: int) -> tuple[list[Sample], dict[str, bytes]]:
    """In the first step one row of two has an image, in the second none."""
    if step == 2:
        return [make_sample("text", 20, step=2)[0], make_sample("more", 20, 9, step=2)[0]], {}
    seen, images = make_sample("seen", 2, (6, IMAGE), 14)
    return [seen, make_sample("text", 24)[0]], images


def train(root: Path, model: Path, ranks: int, freeze: bool) -> TrainerRun:
    run = make_run(root, model, ranks=ranks, freeze_vision=freeze, max_steps=2, seq_len=40, update={"keep_versions": 9})
    run.record(2, samples=lambda step: samples(step)[0], images=samples(1)[1])
    return run.train() if ranks == 1 else run.train_in_forks()


@pytest.mark.parametrize("freeze", [True, False])
def test_two_ranks_train_what_sees_like_one(freeze, tmp_path, tiny_vision_model):
    one, two = (train(tmp_path / str(ranks), tiny_vision_model, ranks, freeze) for ranks in (1, 2))
    for metric in ("loss", "entropy", "optim/grad_norm"):
        assert two.report(2).metrics[metric] == pytest.approx(one.report(2).metrics[metric], rel=1e-4), metric
    stored, trained = load_file(tiny_vision_model / "model.safetensors"), one.weights("0.1")
    assert stored.keys() == trained.keys() == two.weights("0.1").keys(), "published by the names of the checkpoint"
    for name, tensor in two.weights("0.1").items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-5)
        frozen = freeze and ".visual." in name
        assert torch.equal(tensor, stored[name]) == frozen, name
    hf = Qwen3VLForConditionalGeneration.from_pretrained(one.paths.root / "model")
    assert torch.equal(hf.lm_head.weight, one.weights("0.2")["lm_head.weight"])
    assert json.loads((one.paths.root / "model" / "preprocessor_config.json").read_text())["merge_size"] == 2
