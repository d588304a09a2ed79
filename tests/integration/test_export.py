"""Models written from checkpoints load in transformers and are what was trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_hpc.commands import export
from prime_hpc.models.tiny import make_char_tokenizer
from tests.models_support import save_model
from tests.trainer_support import TrainerRun, make_run


def exported(run: TrainerRun, out: Path, *arguments: str) -> dict[str, torch.Tensor]:
    """What the command writes, and transformers takes without a missing or unexpected weight."""
    assert export.main([str(run.paths.root), "--out", str(out), *arguments]) == 0
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoTokenizer.from_pretrained(out).eos_token == "<eos>"
    return load_file(out / "model.safetensors")


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name, tensor in left.items() if not torch.equal(tensor, right[name])] == []


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_any_step_can_be_exported(impl, tmp_path, tiny_model, capsys):
    run = make_run(tmp_path / "run", tiny_model, impl=impl, max_steps=2, checkpoint={"every": 1},
                   update={"keep_versions": 9}).record(2).train()  # fmt: skip
    assert_equal(exported(run, tmp_path / "first", "--step", "1"), run.weights("0.1"))
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "first")
    assert_equal(exported(run, tmp_path / "newest"), run.weights("0.2"))


def test_a_sparse_model_of_two_ranks_is_exported_in_the_published_precision(tmp_path):
    save_model("glm4_moe", tmp_path / "base")
    make_char_tokenizer(tmp_path / "base")
    trainer = {"router_bias_rate": 0.125, "publish_dtype": "bfloat16"}
    run = make_run(tmp_path / "run", tmp_path / "base", ranks=2, max_steps=1, trainer=trainer).record(1)
    assert_equal(exported(run.train_in_forks(), tmp_path / "out"), run.weights("0.1"))


@pytest.mark.filterwarnings("error:torch.distributed is disabled")
def test_adapters_are_exported_alone_or_merged(tmp_path, tiny_model):
    run = make_run(tmp_path / "run", tiny_model, lora={"rank": 4}, max_steps=1).record(1).train()
    assert export.main([str(tmp_path / "run")]) == 0
    alone = tmp_path / "run" / "export" / "step_1"
    assert (alone / "adapter_config.json").exists()
    name = "adapter_model.safetensors"
    assert_equal(load_file(alone / name), load_file(run.paths.root / "adapters" / "default" / name))
    whole = exported(run, tmp_path / "merged", "--merge-lora")
    assert_equal(whole, load_file(run.paths.root / "model" / "model.safetensors"))


def test_what_cannot_be_exported_is_said_in_a_line(tmp_path, tiny_model, capsys):
    make_run(tmp_path, tiny_model, max_steps=1).record(1).train()
    assert export.main([str(tmp_path), "--step", "7"]) == 2
    assert capsys.readouterr().err.endswith("in the command line:\n  --step = 7: expected one of 1\n")
    assert export.main([str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "a folder that is not there yet" in capsys.readouterr().err
