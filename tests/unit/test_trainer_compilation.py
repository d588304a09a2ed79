"""Blocks compiled one by one: no break in their graph, no graph for each number of tokens, and the same gradients."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from prime_hpc.models import varlen
from prime_hpc.models.attention import open_attention
from prime_hpc.models.decoder import CausalLM
from prime_hpc.trainer.compilation import compilations, compile_block
from prime_hpc.trainer.memory.checkpointing import checkpoint_block
from tests.models_support import PlainKernel, assert_near, load_native, save_model

CPU = torch.device("cpu")
ROWS = ([9, 4, 1], [5, 5, 7, 3], [16], [2, 30])


@pytest.fixture(autouse=True)
def plain_kernel(monkeypatch) -> Iterator[None]:
    """The operator of packed attention runs on a CPU, and nothing was compiled before."""
    monkeypatch.setitem(varlen.KERNELS, "varlen", PlainKernel)
    varlen.load.cache_clear()
    # graphs are traced as ever, and run as they are: no compiler of C++ is waited for
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    varlen.load.cache_clear()


def run(model: CausalLM, seq_lens: list[int]) -> Tensor:
    positions = torch.cat([torch.arange(n) for n in seq_lens])
    tokens = torch.arange(len(positions)) * 7 % 48
    return model(tokens, positions, open_attention("varlen", seq_lens, CPU))


@pytest.mark.parametrize(
    ("name", "mode", "graphs"),
    [
        ("qwen3", "selective", 0),
        ("qwen3", "full", 0),
        ("qwen3", "none", 1),
        ("qwen3", "selective", 1),
        ("gemma3_text", "selective", 2),
    ],
)
def test_blocks_give_the_same_gradients_however_they_run(name, mode, graphs, tmp_path):
    save_model(name, tmp_path)
    plain, changed = load_native(tmp_path), load_native(tmp_path)
    for block in changed.model.layers:
        checkpoint_block(block, mode)
        if graphs:
            compile_block(block, fullgraph=True)
    for seq_lens in ROWS:
        for model in (plain, changed):
            run(model, seq_lens).square().mean().backward()
    for (name, expected), actual in zip(plain.named_parameters(), changed.parameters(), strict=True):
        assert_near(actual.grad, expected.grad, name)
    # a block of each kind is compiled once: the first run of four rows with four lengths serves all its layers
    assert compilations() == {"compile/graphs": graphs, "compile/breaks": 0}


def test_selective_checkpointing_computes_no_matrix_product_or_attention_anew(tmp_path):
    save_model("qwen3", tmp_path)
    products = {}
    for mode in ("none", "selective", "full"):
        model = load_native(tmp_path)
        for block in model.model.layers:
            checkpoint_block(block, mode)
        with FlopCounterMode(display=False) as counter:
            run(model, ROWS[0]).sum().backward()
        products[mode] = counter.get_total_flops()
    assert products["selective"] == products["none"] < products["full"]
