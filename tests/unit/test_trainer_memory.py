"""Activations in host memory, and the report of what a rank holds."""

import pytest
import torch
from torch import nn

from prime_hpc.trainer.memory.checkpointing import checkpoint_block
from prime_hpc.trainer.memory.offload import ActivationOffload
from prime_hpc.trainer.memory.report import memory_by_category

CPU = torch.device("cpu")


def make_blocks(count: int = 4) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(count)]


def gradients(blocks: list[nn.Sequential]) -> list[torch.Tensor]:
    """Of two forward passes, each followed by its backward pass."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(5, 8)
        for block in blocks:
            x = x + block(x)
        x.square().sum().backward()
    return [p.grad for block in blocks for p in block.parameters()]


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_offloaded_activations_give_the_same_gradients(in_flight, mode):
    expected, blocks = gradients(make_blocks()), make_blocks()
    offload = ActivationOffload(CPU, in_flight, smallest=0)
    for block in blocks:
        checkpoint_block(block, mode)
        offload.wrap(block)
    assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))


def test_activations_on_their_way_are_bounded_and_small_ones_and_weights_stay(monkeypatch):
    """Of a block's four, the input and output of the activation function are large enough; weights are larger still."""
    blocks, copied = make_blocks(2), []
    offload = ActivationOffload(CPU, 2, smallest=5 * 16 * 4)
    copy = offload._copy
    monkeypatch.setattr(offload, "_copy", lambda kept, to_host: (copied.append(to_host), copy(kept, to_host=to_host)))
    for block in blocks:
        offload.wrap(block)
    x = torch.randn(5, 8)
    for block in blocks:
        x = x + block(x)
    assert copied == [True] * 4
    assert [kept.tensor is None for kept in offload._kept] == [True, True, False, False]
    x.sum().backward()
    assert copied == [True] * 4 + [False] * 2
    assert offload._kept == []


def test_the_report_counts_weights_and_states():
    (block,) = make_blocks(1)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
    gradients([block])
    optimizer.step()
    parameters = 8 * 16 + 16 + 16 * 8 + 8
    scalars = 4  # a step count for each parameter
    report = memory_by_category(block, [optimizer], CPU)
    assert report == {"weights": 4 * parameters / 2**30, "optimizer": 4 * (2 * parameters + scalars) / 2**30}
