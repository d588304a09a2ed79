"""What is applied to blocks from outside a model changes no gradient and counts no token twice."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from prime_hpc.models.balance import ExpertLoad
from prime_hpc.models.recurrence import TorchRecurrence
from tests.models_support import assert_near, load_native, save_model

TOKENS = torch.randint(0, 48, (24,), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.arange(24)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """One document; unlike the packed fallback it may lie in a compiled graph."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def recompute(block: nn.Module) -> None:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_and_recompute(block: nn.Module) -> None:
    """Without a break in the graph, except that a loop over experts asks for their counts, and at a delta rule."""
    whole = block.attends and not hasattr(block.mlp, "experts")
    block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=whole)
    recompute(block)


def run(path: Path, apply: Callable[[nn.Module], None]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Gradients, and the experts' load of one forward and backward."""
    model = load_native(path)
    for block in model.model.layers:
        apply(block)
    load = ExpertLoad(model)
    hidden, chosen = model.model(TOKENS, POSITIONS, attend, recurrence=TorchRecurrence([24], TOKENS.device))
    load.add(chosen)
    hidden.square().sum().backward()
    return {name: p.grad for name, p in model.model.named_parameters()}, load.take()


@pytest.mark.parametrize("apply", [recompute, compile_and_recompute])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "glm4_moe"])
def test_recomputed_and_compiled_blocks_give_the_same_gradients_and_load(name, apply, tmp_path):
    save_model(name, tmp_path)
    expected, expected_load = run(tmp_path, lambda block: None)
    gradients, load = run(tmp_path, apply)
    for parameter, gradient in gradients.items():
        assert_near(gradient, expected[parameter], parameter)
    assert (load is None) == (name != "glm4_moe")
    if load is not None:
        assert load.equal(expected_load)
        assert load.sum(-1).tolist() == [24 * 3] * len(load)
