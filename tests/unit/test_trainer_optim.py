"""The schedule's values and the guard against losses and gradients that are not finite."""

import math

import pytest
import torch

from prime_hpc.config.sections import OptimizerConfig
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.trainer.optim import GuardedOptimizer, build_adamw, learning_rate


def rates(steps: int, **config: object) -> list[float]:
    section = OptimizerConfig(**{"lr": 1.0, **config})
    return [round(learning_rate(section, step, steps), 6) for step in range(1, steps + 1)]


def test_constant_schedule_rises_to_the_rate_and_stays():
    assert rates(5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(3) == [1.0, 1.0, 1.0]


def test_linear_schedule_falls_over_its_last_steps():
    assert rates(8, schedule="linear", warmup_steps=2, decay_steps=4, min_lr=0.2) == [
        0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]  # fmt: skip


def test_cosine_schedule_falls_over_all_steps_after_the_warm_up():
    half = (1 + math.cos(math.pi / 4)) / 2
    assert rates(6, schedule="cosine", warmup_steps=2) == [0.5, 1.0, round(half, 6), 0.5, round(1 - half, 6), 0.0]


def make_guarded(max_skipped: int = 5, **config: object) -> tuple[torch.nn.Linear, GuardedOptimizer]:
    section = OptimizerConfig(**{"lr": 0.1, **config})
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model, GuardedOptimizer(build_adamw(model, section), section, 10, max_skipped)


def set_gradient(model: torch.nn.Linear, value: float) -> None:
    model.weight.grad, model.bias.grad = torch.full((1, 2), value), torch.zeros(1)


def test_a_step_reports_the_norm_before_clipping_and_moves_by_the_rate():
    model, optimizer = make_guarded(max_grad_norm=1.0)
    set_gradient(model, 3.0)
    metrics = optimizer.step(1, loss=0.5)
    assert metrics == {"optim/grad_norm": pytest.approx(3 * 2**0.5), "optim/lr": 0.1, "optim/skipped": 0.0}
    assert model.weight.tolist() == [pytest.approx([-0.1, -0.1])]


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 0.5), (math.inf, 0.5), (1.0, math.nan)])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_alone(gradient, loss):
    model, optimizer = make_guarded()
    set_gradient(model, gradient)
    assert optimizer.step(1, loss)["optim/skipped"] == 1.0
    assert model.weight.tolist() == [[0.0, 0.0]]
    assert optimizer.optimizer.state == {}
    assert model.weight.grad is None


def test_only_skipped_steps_in_a_row_stop_the_run():
    model, optimizer = make_guarded(max_skipped=2)
    for step, loss in enumerate([math.nan, math.nan, 1.0, math.nan, math.nan], 1):
        set_gradient(model, 1.0)
        optimizer.step(step, loss)
    set_gradient(model, 1.0)
    with pytest.raises(InfrastructureFailure, match="3 steps in a row up to step 6 .* lower optimizer.lr"):
        optimizer.step(6, math.nan)
    assert optimizer.skipped == 5


def test_weight_decay_spares_biases():
    _, optimizer = make_guarded(weight_decay=0.1)
    assert [(g["params"][0].ndim, g["weight_decay"]) for g in optimizer.optimizer.param_groups] == [(2, 0.1), (1, 0.0)]
