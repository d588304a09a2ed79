"""Models that run in transformers alone, in the trainer: over ranks, and published in the checkpoint's names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prime_hpc.models.tiny import make_char_tokenizer
from prime_hpc.trainer.export import export
from tests.hf_models import save_model
from tests.trainer_support import TrainerRun, make_run, make_samples


def train(root: Path, model: Path, ranks: int) -> TrainerRun:
    """Two steps on five samples each, which two ranks cannot share evenly."""
    run = make_run(root, model, ranks=ranks, impl="hf", max_steps=2, update={"keep_versions": 9})
    run.record(2, samples=lambda step: make_samples(step, count=5))
    return run.train() if ranks == 1 else run.train_in_forks()


@pytest.mark.parametrize("name", ["linear attention", "renamed mixtures"])
def test_steps_over_two_ranks_are_those_of_one_and_published_as_the_checkpoint_was(name, tmp_path):
    save_model(name, tmp_path / "base")
    make_char_tokenizer(tmp_path / "base")
    one, two = (train(tmp_path / str(ranks), tmp_path / "base", ranks) for ranks in (1, 2))
    stored = load_file(tmp_path / "base" / "model.safetensors")
    for run in (one, two):
        start = run.weights("0.0")
        assert start.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[key]) for key, tensor in start.items())
    expected = one.weights("0.2")
    assert any(not torch.equal(tensor, stored[key]) for key, tensor in expected.items())
    for key, tensor in two.weights("0.2").items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=2e-6, msg=lambda text, key=key: f"{key} {text}")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "1" / "model")
    assert torch.equal(hf.lm_head.weight, expected["lm_head.weight"])
    (exported,) = export(two.paths.checkpoint(2), tmp_path / "exported", merge_lora=False)
    found = load_file(exported / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(tensor, two.weights("0.2")[key]) for key, tensor in found.items())
