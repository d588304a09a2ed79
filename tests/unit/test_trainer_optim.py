"""The schedule's values and the guard against losses and gradients that are not finite."""

import math

import pytest
import torch
from pydantic import TypeAdapter

from prime_hpc.config.optimizer import AdamW, Muon, OptimizerConfig, SignSGD
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.trainer.optim import WHOLE, GuardedOptimizer, learning_rate
from prime_hpc.trainer.optimizers import build_optimizers, newton_schulz


def rates(steps: int, **config: object) -> list[float]:
    section = AdamW(**{"lr": 1.0, **config})
    return [round(learning_rate(section, step, steps), 6) for step in range(1, steps + 1)]


def test_constant_schedule_rises_to_the_rate_and_stays():
    assert rates(5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(3) == [1.0, 1.0, 1.0]


def test_wsd_schedule_is_stable_and_falls_over_its_last_steps():
    assert rates(8, schedule="wsd", warmup_steps=2, decay_steps=4, min_lr=0.2) == [
        0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]  # fmt: skip


def test_linear_schedule_falls_from_the_warm_up_to_the_end():
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_peak_of_its_own_follows_the_same_schedule():
    section = AdamW(lr=1.0, schedule="linear", warmup_steps=2, min_lr=0.2)
    assert [round(learning_rate(section, step, 6, 0.1), 6) for step in (1, 2, 4, 6)] == [0.05, 0.1, 0.1, 0.1]
    assert [round(learning_rate(section, step, 6, 0.6), 6) for step in (1, 2, 4, 6)] == [0.3, 0.6, 0.4, 0.2]


def test_cosine_schedule_falls_over_all_steps_after_the_warm_up():
    half = (1 + math.cos(math.pi / 4)) / 2
    assert rates(6, schedule="cosine", warmup_steps=2) == [0.5, 1.0, round(half, 6), 0.5, round(1 - half, 6), 0.0]


def make_guarded(max_skipped: int = 5, **config: object) -> tuple[torch.nn.Linear, GuardedOptimizer]:
    section = AdamW(**{"lr": 0.1, **config})
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model, GuardedOptimizer(
        {WHOLE: build_optimizers(model.named_parameters(), section)}, section, 10, max_skipped
    )


def set_gradient(model: torch.nn.Linear, value: float) -> None:
    model.weight.grad, model.bias.grad = torch.full((1, 2), value), torch.zeros(1)


def test_a_step_reports_the_norm_before_clipping_and_moves_by_the_rate():
    model, optimizer = make_guarded(max_grad_norm=1.0)
    set_gradient(model, 3.0)
    metrics = optimizer.step(1, {WHOLE: 0.5})
    assert metrics == {"optim/grad_norm": pytest.approx(3 * 2**0.5), "optim/lr": 0.1, "optim/skipped": 0.0}
    assert model.weight.tolist() == [pytest.approx([-0.1, -0.1])]


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 0.5), (math.inf, 0.5), (1.0, math.nan)])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_alone(gradient, loss):
    model, optimizer = make_guarded()
    set_gradient(model, gradient)
    assert optimizer.step(1, {WHOLE: loss})["optim/skipped"] == 1.0
    assert model.weight.tolist() == [[0.0, 0.0]]
    assert [o.state for o in optimizer.optimizers] == [{}]
    assert model.weight.grad is None


def test_only_skipped_steps_in_a_row_stop_the_run():
    model, optimizer = make_guarded(max_skipped=2)
    for step, loss in enumerate([math.nan, math.nan, 1.0, math.nan, math.nan], 1):
        set_gradient(model, 1.0)
        optimizer.step(step, {WHOLE: loss})
    set_gradient(model, 1.0)
    with pytest.raises(InfrastructureFailure, match="3 steps in a row up to step 6 .* lower optimizer.lr"):
        optimizer.step(6, {WHOLE: math.nan})
    assert optimizer.skipped == 5


class Parts(torch.nn.Module):
    """One parameter of each part, under the names that models give them."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(4, 2)
        self.mlp = torch.nn.ModuleDict({"router": torch.nn.Linear(2, 3, bias=False), "up_proj": torch.nn.Linear(2, 2)})


def groups_of(**options: object) -> list[list[tuple[tuple[int, ...], float, float]]]:
    """(shape of the first parameter, peak rate, decay) of each group of each optimiser."""
    model, config = Parts(), TypeAdapter(OptimizerConfig).validate_python(options)
    return [[(tuple(g["params"][0].shape), g["peak_lr"], g["weight_decay"]) for g in optimizer.param_groups]
            for optimizer in build_optimizers(model.named_parameters(), config)]  # fmt: skip


def test_parts_have_rates_of_their_own_and_biases_do_not_decay():
    options = {"lr": 1.0, "embedding_lr": 0.5, "router_lr": 0.0, "weight_decay": 0.1}
    whole = [((4, 2), 0.5, 0.1), ((3, 2), 0.0, 0.1), ((2, 2), 1.0, 0.1), ((2,), 1.0, 0.0)]
    assert groups_of(name="adamw", **options) == [whole]
    assert groups_of(name="signsgd", **options) == [whole]


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    muon, adamw = groups_of(name="muon", lr=1.0)
    assert [shape for shape, _, _ in muon] == [(2, 2)]
    assert [shape for shape, _, _ in adamw] == [(4, 2), (3, 2), (2,)]


@pytest.mark.parametrize(("name", "shape"), [
    ("linear_attn.conv1d.weight", (6, 1, 4)),
    ("conv.conv.weight", (6, 1, 3)),
    ("mlp.shared_experts.gate.weight", (1, 6)),
    ("mlp.shared_expert_gate.weight", (1, 6)),
])  # fmt: skip
def test_taps_of_single_channels_and_single_gates_are_no_matrices(name, shape):
    [adamw] = build_optimizers([(name, torch.nn.Parameter(torch.zeros(shape)))], Muon(lr=1.0))
    assert isinstance(adamw, torch.optim.AdamW) and adamw.param_groups[0]["weight_decay"] == 0


def test_routers_are_known_under_every_name():
    for name in ("mlp.router.weight", "mlp.router.gate.weight", "mlp.gate.weight"):
        [adamw] = build_optimizers([(name, torch.nn.Parameter(torch.zeros(3, 6)))], Muon(lr=1.0, router_lr=0.5))
        assert adamw.param_groups[0]["peak_lr"] == 0.5


def test_sign_descent_moves_every_weight_by_the_rate():
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0]]))
    weight.grad = torch.tensor([[5.0, -1e-9, 0.0]])
    [optimizer] = build_optimizers([("w", weight)], SignSGD(lr=0.25, weight_decay=0.5))
    optimizer.step()
    assert weight.tolist() == [[0.875 - 0.25, 1.75 + 0.25, 2.625]]
    assert not optimizer.state


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 5, 5)])
def test_newton_schulz_brings_singular_values_near_one_and_keeps_singular_vectors(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    found = u.mT @ newton_schulz(matrices) @ vt.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < values.min() and values.max() < 1.25
    torch.testing.assert_close(found, values.diag_embed(), rtol=0, atol=1e-9)


def test_muon_steps_along_the_orthogonalised_momentum():
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(6, 3, generator=generator) for _ in range(3))
    weight = torch.nn.Parameter(start.clone())
    [optimizer] = build_optimizers([("w", weight)], Muon(lr=0.1, weight_decay=0.5, momentum=0.9))
    expected, momentum = start, torch.zeros(6, 3)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + gradient
        expected = 0.95 * expected - 0.1 * 0.2 * 6**0.5 * newton_schulz(gradient + 0.9 * momentum)
    torch.testing.assert_close(weight.detach(), expected)


def test_each_tenant_is_clipped_and_skipped_by_itself():
    weights = {name: torch.nn.Parameter(torch.zeros(1, 1)) for name in "abc"}
    config = SignSGD(lr=1.0, max_grad_norm=1.0)
    tenants = {name: build_optimizers([(name, weight)], config) for name, weight in weights.items()}
    optimizer = GuardedOptimizer(tenants, config, 10, 5)
    for weight, value in zip(weights.values(), (3.0, math.nan, 4.0), strict=True):
        weight.grad = torch.full((1, 1), value)
    metrics = optimizer.step(1, {"a": 0.5, "b": 0.5})
    assert [weight.item() for weight in weights.values()] == [-1.0, 0.0, 0.0]
    assert all(weight.grad is None for weight in weights.values())
    assert metrics["adapter/a/grad_norm"] == 3.0 and math.isnan(metrics["adapter/b/grad_norm"])
    assert metrics["optim/skipped"] == 1.0 and "adapter/c/grad_norm" not in metrics


def test_a_peak_that_was_changed_scales_every_group() -> None:
    config = AdamW(lr=0.1, warmup_steps=2)
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "peak_lr": peak} for peak in (0.1, 0.3)]
    guarded = GuardedOptimizer({WHOLE: [torch.optim.SGD(groups, lr=0.1)]}, config, 10, 0)
    for parameter in (group["params"][0] for group in groups):
        parameter.grad = torch.zeros(1)
    guarded.retune(0.05)
    assert guarded.step(1, {WHOLE: 0.0})["optim/lr"] == 0.025
    assert [group["lr"] for group in guarded.optimizers[0].param_groups] == pytest.approx([0.025, 0.075])
