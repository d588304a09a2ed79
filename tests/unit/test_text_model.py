"""The text model of a checkpoint with a vision tower is that of transformers, however its experts were laid out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from prime_hpc.config.run import RunConfig
from prime_hpc.models.attention import BlockDiagonalAttention
from prime_hpc.models.families import find_model_problems
from prime_hpc.models.recurrence import TorchRecurrence
from tests.models_support import CONFIGS, SHAPE, assert_near, load_native
from tools.text_model import main

TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
         "num_position_embeddings": 16}  # fmt: skip


def save_composite(kind: str, path: Path) -> PreTrainedModel:
    """Write a model with a tower, and give what transformers takes for its text model."""
    _, others = CONFIGS[f"{kind}_text"]
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, text_config={**SHAPE, **others}, vision_config=TOWER)
    AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def stack_experts(path: Path) -> None:
    """Lay out experts as the published checkpoints do, in two files."""
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        stem = f"model.language_model.layers.{layer}.mlp.experts"
        parts = {part: torch.stack([tensors.pop(f"{stem}.{e}.{part}.weight") for e in range(8)])
                 for part in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
        tensors[f"{stem}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{stem}.down_proj"] = parts["down_proj"]
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, path / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("kind", "stacked"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)], ids=str
)
def test_the_text_model_gives_the_logits_of_transformers(kind, stacked, tmp_path):
    hf = save_composite(kind, tmp_path / "whole")
    if stacked:
        stack_experts(tmp_path / "whole")
    (tmp_path / "whole" / "tokenizer.json").write_text("{}")
    (tmp_path / "whole" / "preprocessor_config.json").write_text("{}")
    assert main([str(tmp_path / "whole"), "--out", str(tmp_path / "text")]) == 0
    assert not (tmp_path / "text" / "preprocessor_config.json").exists()
    assert (tmp_path / "text" / "tokenizer.json").exists()
    tokens, positions = torch.arange(12) * 7 % 48, torch.arange(12)
    attend, recurrence = (opened([12], tokens.device) for opened in (BlockDiagonalAttention, TorchRecurrence))
    model = load_native(tmp_path / "text")
    assert_near(model(tokens, positions, attend, recurrence=recurrence), hf(input_ids=tokens[None]).logits[0])


def test_a_model_with_a_tower_is_refused_with_the_way_out(tmp_path):
    save_composite("qwen3_5", tmp_path)
    config = RunConfig()
    config.model.path = str(tmp_path)
    [problem] = find_model_problems(config)
    assert problem.key == "model.path" and "`python -m tools.text_model FOLDER --out TEXT`" in problem.expected


def test_other_models_are_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", str(tmp_path / "text")])
    assert "no checkpoint of Qwen3.5: its model_type is qwen3" in capsys.readouterr().err
