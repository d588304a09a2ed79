"""FP8 products of experts: within what eight bits can say of float32, in the layout that the kernel takes."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from prime_hpc.models import grouped_fp8
from prime_hpc.models.grouped_fp8 import Padding, compute_padded, quantise, scaled_grouped_matmul
from prime_hpc.models.moe import Experts, MixtureOfExperts, Routing
from prime_hpc.trainer.compilation import compilations, compile_block
from prime_hpc.trainer.low_precision import use_fp8_in_experts
from prime_hpc.trainer.memory.checkpointing import checkpoint_block

COUNTS = [[33, 0, 30, 7, 0], [0, 0, 0, 1, 0], [16, 32, 16, 0, 6], [0, 0, 0, 0, 0]]
ERROR = 0.04
"""Share of the norm by which a product may be off: rounding to three bits of mantissa is off by 2.6 % on average, on
either side of the product."""
ROUNDING = 0.005
"""The same of a product in bfloat16."""


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def multiply(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return compute_padded(lambda padded, sizes: scaled_grouped_matmul(padded, weights, sizes), rows, counts)


def make_operands(rows: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    operands = torch.randn(rows, 64), torch.randn(5, 96, 64) / 8
    return tuple(x.to(device, torch.bfloat16).requires_grad_() for x in operands)


def make_mixture() -> MixtureOfExperts:
    mixture = MixtureOfExperts(32, 48, Routing(experts=6, top_k=2, score="softmax", renormalise=True))
    torch.manual_seed(1)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mixture.bfloat16()


def make_fp8_mixture() -> MixtureOfExperts:
    mixture = make_mixture()
    use_fp8_in_experts(nn.ModuleList([mixture]))
    return mixture


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_padding_makes_whole_groups_that_hold_their_rows(counts):
    rows = torch.arange(1.0, sum(counts) + 1)[:, None].requires_grad_()
    padding = Padding.of(torch.tensor(counts), len(rows))
    padded = padding.add(rows)
    # 16 rows for each group more than there were, however they are divided
    assert len(padded) == -(-len(rows) // 16) * 16 + 16 * len(counts) == padding.counts.sum()
    assert all(size >= 16 and size % 16 == 0 for size in padding.counts.tolist())
    for part, whole in zip(rows.split(counts), padded.split(padding.counts.tolist()), strict=True):
        assert whole[: len(part)].equal(part) and not whole[len(part) :].any()
    assert padding.remove(padded).equal(rows)
    upstream = torch.arange(float(len(rows)))[:, None]
    assert torch.autograd.grad(padding.remove(padded), rows, upstream)[0].equal(upstream)


@pytest.mark.parametrize("counts", COUNTS[:3], ids=str)
def test_products_and_both_gradients_follow_float32(counts):
    rows, weights = make_operands(sum(counts))
    output = multiply(rows, weights, torch.tensor(counts))
    expected = torch.cat([part @ w.T for part, w in zip(rows.float().split(counts), weights.float(), strict=True)])
    assert output.dtype == torch.bfloat16 and error(output, expected) < ERROR
    upstream = torch.randn_like(output)
    found = torch.autograd.grad(output, [rows, weights], upstream)
    wanted = torch.autograd.grad(expected, [rows, weights], upstream.float())
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, torch.bfloat16]
    assert error(found[0], wanted[0]) < ERROR and error(found[1], wanted[1]) < ROUNDING
    assert not found[1][[i for i, count in enumerate(counts) if not count]].any()


def test_weights_get_a_gradient_of_zeros_where_a_rank_has_no_rows():
    rows, weights = make_operands(0)
    output = multiply(rows, weights, torch.tensor(COUNTS[-1]))
    gradients = torch.autograd.grad(output.sum(), [rows, weights])
    assert output.shape == (0, 96) and gradients[0].shape == (0, 64)
    assert gradients[1].shape == weights.shape and not gradients[1].any()


def test_a_row_is_as_exact_as_any_however_small_it_is():
    sizes = torch.logspace(-12, 6, 40)[:, None]
    rows = (torch.randn(40, 64, generator=torch.Generator().manual_seed(2)) * sizes).bfloat16()
    numbers, scales = quantise(rows)
    assert numbers.is_contiguous() and numbers.float().abs().amax(-1).tolist() == [448.0] * 40
    for row, restored in zip(rows, numbers.float() * scales[:, None], strict=True):
        assert error(restored, row) < ERROR
    assert not quantise(torch.zeros(2, 3))[0].float().any()


def test_operands_lie_as_the_kernel_takes_them():
    """On no device at all, where torch checks strides, alignment and the shapes of scales, but computes nothing."""
    rows, weights = make_operands(70, "meta")
    output = multiply(rows, weights, torch.tensor(COUNTS[0], device="meta"))
    gradients = torch.autograd.grad(output, [rows, weights], torch.empty_like(output))
    assert output.shape == (70, 96) and [g.shape for g in gradients] == [rows.shape, weights.shape]


def run(mixture: MixtureOfExperts, tokens: int) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    output, _ = mixture(x)
    return output, list(torch.autograd.grad(output.float().square().sum(), list(mixture.parameters())))


def test_a_mixture_in_fp8_follows_that_in_bfloat16_compiled_or_not(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    plain, scaled, compiled = make_mixture(), make_fp8_mixture(), make_fp8_mixture()
    compile_block(compiled, fullgraph=True)
    for tokens in (37, 21):
        expected, wanted = run(plain, tokens)
        output, found = run(scaled, tokens)
        assert error(output, expected) < 2 * ERROR
        for actual, exact in zip(found, wanted, strict=True):
            assert error(actual, exact) < 3 * ERROR
        again, same = run(compiled, tokens)
        assert again.equal(output) and all(a.equal(b) for a, b in zip(same, found, strict=True))


def test_all_blocks_share_what_is_compiled_for_the_first(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(10):
        mixture = make_fp8_mixture()
        compile_block(mixture, fullgraph=True)
        run(mixture, 10)
    assert compilations()["compile/graphs"] == 1


@pytest.mark.parametrize(("mode", "products"), [("none", 9), ("selective", 9), ("full", 12)])
def test_selective_checkpointing_keeps_the_products(mode, products, monkeypatch):
    mixture, calls = make_fp8_mixture(), []
    checkpoint_block(mixture, mode)
    multiply = grouped_fp8.grouped_mm
    monkeypatch.setattr(grouped_fp8, "grouped_mm", lambda *args, **kwargs: calls.append(1) or multiply(*args, **kwargs))
    run(mixture, 10)
    assert len(calls) == products


def test_experts_of_sizes_that_the_kernel_does_not_take_stay_as_they_are():
    mixture = MixtureOfExperts(32, 40, Routing(experts=6, top_k=2, score="softmax", renormalise=True))
    use_fp8_in_experts(nn.ModuleList([mixture]))
    assert type(mixture.experts) is Experts
