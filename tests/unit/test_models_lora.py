"""Low-rank updates: they start at nothing, equal merged weights, and adapters in one row do not see each other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prime_hpc.config.lora import LoRAConfig, Target
from prime_hpc.models.attention import BlockDiagonalAttention
from prime_hpc.models.decoder import CausalLM
from prime_hpc.models.families import load_family
from prime_hpc.models.lora import LoRA, adapter_of, attach
from prime_hpc.models.recurrence import TorchRecurrence
from prime_hpc.trainer.lora import PEFT_CONFIG, initialise, make_peft_folder, merge
from tests.models_support import FAMILY_NAMES, load_native, save_model

SEQ_LENS = [5, 4, 6]
TARGETS = list(get_args(Target))


def adapt(model: torch.nn.Module, adapters: list[str], *, zero: bool = False) -> LoRA:
    """Attach updates of rank 3 to `model`, which are random, or none yet."""
    lora = attach(model, adapters, 3, 6.0, TARGETS)
    for updates in lora.updates.values():
        updates.to_empty(device="cpu")
    initialise(lora, 0)
    for adapter in adapters if not zero else ():
        for i, (_, parameter) in enumerate(lora.parameters(adapter)):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(100 * ord(adapter) + i))
    return lora


def logits(model: CausalLM, seq_lens: list[int], tokens: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(n) for n in seq_lens])
    attend, recurrence = (opened(seq_lens, torch.device("cpu")) for opened in (BlockDiagonalAttention, TorchRecurrence))
    return model(tokens, positions, attend, recurrence=recurrence)


def tokens_of(seq_lens: list[int]) -> Tensor:
    return torch.randint(0, 48, (sum(seq_lens),), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_fresh_updates_change_nothing_and_trained_ones_equal_merged_weights(family, tmp_path):
    save_model(family, tmp_path)
    tokens, base = tokens_of(SEQ_LENS), load_native(tmp_path)
    expected = logits(base, SEQ_LENS, tokens)
    fresh = load_native(tmp_path)
    adapt(fresh, ["a"], zero=True)
    assert torch.equal(logits(fresh, SEQ_LENS, tokens), expected)
    model, merged = load_native(tmp_path), load_native(tmp_path)
    lora = adapt(model, ["a"])
    changed = set()
    for name, parameter in merged.named_parameters():
        weight = merge(lora, name, parameter.detach(), "a")
        changed |= {name} if weight is not parameter and not torch.equal(weight, parameter) else set()
        parameter.data = weight
    attention = {"o"} if family in ("deepseek_v3", "glm_moe_dsa") else {"q", "k", "v", "o"}
    attention |= {"in", "out"} if "3_5" in family else set()
    assert {name.rsplit("_proj", 1)[0].rpartition(".")[2] for name in changed} == attention | {"gate", "up", "down"}
    found = logits(model, SEQ_LENS, tokens)
    torch.testing.assert_close(found, logits(merged, SEQ_LENS, tokens), rtol=0, atol=2e-5)
    assert (found - expected).abs().max() > 0.1


def test_transformers_models_are_adapted_alike(tmp_path):
    save_model("qwen3", tmp_path)
    tokens, native = tokens_of([9]), load_native(tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    adapt(native, ["a"])
    adapt(hf, ["a"])
    torch.testing.assert_close(hf(tokens[None]).logits[0], logits(native, [9], tokens), rtol=0, atol=2e-5)


def gradients(lora: LoRA, adapter: str) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in lora.parameters(adapter):
        yield name, parameter.grad


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_two_adapters_of_a_row_compute_and_learn_as_each_alone(family, tmp_path):
    """Documents 0 and 1 are those of adapter a, document 2 that of b, and c has none."""
    save_model(family, tmp_path)
    model, tokens = load_native(tmp_path), tokens_of(SEQ_LENS)
    together = adapt(model, ["a", "b", "c"])
    together.select({"a": 9, "b": 6})
    found = logits(model, SEQ_LENS, tokens)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(6))
    (found * upstream).sum().backward()
    for adapter, seq_lens, part in (("a", [5, 4], slice(0, 9)), ("b", [6], slice(9, 15))):
        alone = load_native(tmp_path)
        lora = adapt(alone, [adapter])
        own = logits(alone, seq_lens, tokens[part])
        torch.testing.assert_close(found[part], own, rtol=0, atol=1e-5)
        (own * upstream[part]).sum().backward()
        expected = dict(gradients(lora, adapter))
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        for name, gradient in gradients(together, adapter):
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * scale)
    assert all(gradient.abs().max() == 0 for _, gradient in gradients(together, "c"))
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if adapter_of(name) is None)


def test_names_tell_whose_a_parameter_is():
    assert adapter_of("model.layers.0.self_attn.q_proj.weight") is None
    assert adapter_of("model.layers.0.self_attn.q_proj.lora.first.a") == "first"
    assert adapter_of("model.layers.0.mlp.experts.lora.gate_proj.second.b") == "second"


@pytest.mark.parametrize(("family", "experts"), [("glm4_moe", {"down_proj", "gate_proj", "up_proj"}),
                                                 ("minimax_m2", {"w1", "w2", "w3"})])  # fmt: skip
def test_an_adapter_names_what_it_updates_as_the_checkpoint_does(
    family: str, experts: set[str], tmp_path: Path
) -> None:
    config = LoRAConfig(rank=3, targets=["q_proj", "experts"])
    make_peft_folder(tmp_path / "adapter", config, "base", load_family(family).conversion)
    written = json.loads((tmp_path / "adapter" / PEFT_CONFIG).read_text())
    assert written["target_modules"] == sorted({"q_proj", *experts})
