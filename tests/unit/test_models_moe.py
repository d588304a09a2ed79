"""Routing, experts and balance against the same written out token by token."""

import pytest
import torch
from torch import Tensor

from prime_hpc.models.attention import BlockDiagonalAttention
from prime_hpc.models.balance import ExpertLoad, even_out, max_violation
from prime_hpc.models.grouped import Dispatch, grouped_matmul, multiply_by_kernel, multiply_by_loop
from prime_hpc.models.layers import SwiGLU
from prime_hpc.models.moe import MixtureOfExperts, Router, Routing
from tests.models_support import assert_near, load_native, save_model

HIDDEN, TOKENS = 8, 11
SOFTMAX = Routing(experts=6, top_k=2, score="softmax", renormalise=True)
GROUPED = Routing(experts=6, top_k=2, score="sigmoid", renormalise=True, scale=2.5, correction=True, groups=3,
                  top_groups=1)  # fmt: skip


def fill(module: torch.nn.Module) -> None:
    torch.manual_seed(7)
    for tensor in [*module.parameters(), *module.buffers()]:
        torch.nn.init.normal_(tensor.data, std=0.5)


def make_router(routing: Routing) -> Router:
    router = Router(HIDDEN, routing)
    fill(router)
    return router


def make_states() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(8))


def test_softmax_routing_takes_the_likeliest_experts():
    router, x = make_router(SOFTMAX), make_states()
    weights, chosen = router(x)
    for token in range(TOKENS):
        scores = (router.weight @ x[token]).softmax(-1)
        best = scores.argsort(descending=True)[:2]
        assert chosen[token].tolist() == best.tolist()
        torch.testing.assert_close(weights[token], scores[best] / scores[best].sum())


def test_grouped_routing_corrects_the_choice_but_not_the_weights():
    router, x = make_router(GROUPED), make_states()
    weights, chosen = router(x)
    for token in range(TOKENS):
        scores = (router.weight @ x[token]).sigmoid()
        corrected = scores + router.score_correction
        group = corrected.view(3, 2).sum(-1).argmax().item()
        best = sorted((2 * group, 2 * group + 1), key=lambda e: -corrected[e])
        assert chosen[token].tolist() == best
        torch.testing.assert_close(weights[token], 2.5 * scores[best] / scores[best].sum())


def test_replayed_experts_are_weighted_by_present_scores_and_get_gradients():
    router, x = make_router(SOFTMAX), make_states()
    own_weights, own = router(x)
    replay = torch.stack([(own[:, 0] + 1) % 6, (own[:, 0] + 2) % 6], dim=-1)
    replay[3:5] = -1
    weights, chosen = router(x, replay)
    assert chosen[3:5].equal(own[3:5]) and weights[3:5].equal(own_weights[3:5])
    recorded = [t for t in range(TOKENS) if t not in (3, 4)]
    assert chosen[recorded].equal(replay[recorded])
    scores = (x @ router.weight.T).softmax(-1).gather(-1, replay.clamp(min=0))
    torch.testing.assert_close(weights[recorded], (scores / scores.sum(-1, keepdim=True))[recorded])
    gradient, expected = (torch.autograd.grad(w[recorded, 0].sum(), router.weight, retain_graph=True)[0]
                          for w in (weights, scores / scores.sum(-1, keepdim=True)))  # fmt: skip
    torch.testing.assert_close(gradient, expected)
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("multiply", [grouped_matmul, multiply_by_loop, multiply_by_kernel])
def test_grouped_products_equal_one_product_a_group_also_where_a_group_is_empty(multiply):
    torch.manual_seed(9)
    rows, weights = torch.randn(9, 8, requires_grad=True), torch.randn(4, 16, 8, requires_grad=True)
    output = multiply(rows, weights, torch.tensor([3, 0, 5, 1]))
    groups = torch.tensor([0] * 3 + [2] * 5 + [3])
    expected = torch.einsum("mk,mnk->mn", rows, weights[groups])
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    gradients = torch.autograd.grad(output, [rows, weights], upstream)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, [rows, weights], upstream), strict=True):
        torch.testing.assert_close(gradient, wanted)
    assert gradients[1][1].abs().max() == 0


def test_tokens_go_to_their_experts_and_back():
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1]])
    dispatch = Dispatch.of(chosen, 4)
    assert dispatch.counts.tolist() == [2, 2, 2, 0]
    x = torch.arange(3.0)[:, None]
    rows = dispatch.scatter(x)
    assert rows[:, 0].tolist() == [0, 1, 1, 2, 0, 2]
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    experts = torch.tensor([10.0, 10, 100, 100, 1000, 1000])[:, None]
    assert dispatch.gather(experts, weights)[:, 0].tolist() == [1020, 430, 5600]


def test_gradients_of_the_dispatch_are_those_of_finite_differences():
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [3, 0]])
    dispatch = Dispatch.of(chosen, 4)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(dispatch.scatter, (x,))
    rows = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(dispatch.gather, (rows, weights))


def test_half_precision_outputs_are_weighted_and_summed_in_float32():
    """As plain autograd has it, gradients too, over experts that get many tokens and none."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(50, 6, generator=generator).topk(3).indices
    dispatch, upstream = Dispatch.of(chosen, 7), torch.randn(50, 16, generator=generator).bfloat16()
    rows = torch.randn(150, 16, generator=generator).bfloat16().requires_grad_()
    weights = torch.rand(50, 3, generator=generator).requires_grad_()
    expected = (rows[chosen.flatten().argsort(stable=True).argsort()].view(50, 3, 16) * weights[..., None]).sum(1)
    output = dispatch.gather(rows, weights)
    assert torch.equal(output, expected.bfloat16())
    wanted = torch.autograd.grad(expected, [rows, weights], upstream.float())
    found = torch.autograd.grad(output, [rows, weights], upstream)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-6)


def test_a_replayed_model_takes_the_recorded_experts_of_each_layer(tmp_path):
    """Layer 0 of the tiny GLM is dense, so that the record has an entry without meaning."""
    save_model("glm4_moe", tmp_path)
    model, attend = load_native(tmp_path), BlockDiagonalAttention([5, 4], torch.device("cpu"))
    tokens, positions = torch.arange(9), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
    hidden, own = model.model(tokens, positions, attend)
    record = torch.stack([torch.full_like(own[0], -1), *own])
    same, _ = model.model(tokens, positions, attend, record)
    assert torch.equal(same, hidden)
    record[2, 8] = (record[2, 8] + 1) % 8
    other, chosen = model.model(tokens, positions, attend, record)
    assert torch.equal(chosen[0], own[0]) and torch.equal(chosen[1], record[2])
    assert_near(other[:8], hidden[:8])
    assert (other[8] - hidden[8]).abs().max() > 0.01


@pytest.mark.parametrize("routing", [SOFTMAX, GROUPED], ids=["softmax", "grouped"])
def test_a_mixture_is_the_weighted_sum_of_its_experts(routing):
    mixture = MixtureOfExperts(HIDDEN, 5, routing, SwiGLU(HIDDEN, 10))
    fill(mixture)
    x = make_states()
    y, chosen = mixture(x)
    weights, experts = mixture.router(x), mixture.experts
    assert chosen.equal(weights[1])
    for token in range(TOKENS):
        expected = mixture.shared_experts(x[token])
        for weight, e in zip(weights[0][token], chosen[token], strict=True):
            gate, up = experts.gate_proj[e] @ x[token], experts.up_proj[e] @ x[token]
            expected = expected + weight * (experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(y[token], expected)


def test_max_violation_is_the_excess_of_the_busiest_expert():
    load = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [6, 2, 4, 4]])
    assert max_violation(load).tolist() == [0.0, 3.0, 0.5]


def test_load_adds_up_until_it_is_taken():
    mixture = torch.nn.ModuleList([MixtureOfExperts(HIDDEN, 5, SOFTMAX) for _ in range(2)])
    load = ExpertLoad(mixture)
    first, second = torch.tensor([[0, 1], [0, 5]]), torch.tensor([[2, 3], [2, 4]])
    load.add([first, second])
    load.add([first[:1], second[:1]])
    assert load.take().tolist() == [[3, 2, 0, 0, 0, 1], [0, 0, 3, 2, 1, 0]]
    assert load.take() is None


def test_corrections_move_by_the_rate_towards_even_load():
    correction = torch.tensor([0.5, 0.0, -0.25, 0.0])
    even_out(correction, torch.tensor([9, 4, 1, 6]), rate=0.125)
    assert correction.tolist() == [0.375, 0.125, -0.125, -0.125]


def test_corrections_even_out_a_lopsided_router():
    routing = Routing(experts=6, top_k=2, score="sigmoid", renormalise=True, correction=True)
    router, x = make_router(routing), torch.randn(256, HIDDEN, generator=torch.Generator().manual_seed(1))
    load, violations = ExpertLoad(router), []
    for _ in range(200):
        load.add([router(x)[1]])
        counts = load.take()
        violations.append(max_violation(counts).item())
        even_out(router.score_correction, counts[0], rate=0.01)
    assert violations[0] > 0.5
    assert max(violations[-20:]) < 0.1
