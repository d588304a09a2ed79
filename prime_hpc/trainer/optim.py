"""AdamW, its schedule, and one guarded optimiser step."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from prime_hpc.config.sections import OptimizerConfig
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.trainer.parallel.clip import clip_gradients


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the sharded parameters; weight decay applies to matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=tuple(config.betas),
                             eps=config.eps, fused=parameters[0].is_cuda)  # fmt: skip


def learning_rate(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """The rate of `step`, counted from 1: a pure function, so a resumed run needs no state for it.

    Warm-up rises to `lr` at step `warmup_steps`. A linear decay falls over the last `decay_steps` (warm-up, stable,
    decay; Hu et al. 2024, section 4.1), a cosine over all steps after the warm-up (Loshchilov & Hutter 2017); both
    reach `min_lr` at `max_steps`. A run too short for warm-up and decay shortens the decay first.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    after_warmup = max(0, max_steps - config.warmup_steps)
    decay_steps = {"constant": 0, "linear": min(config.decay_steps, after_warmup), "cosine": after_warmup}
    length = decay_steps[config.schedule]
    done = max(0.0, step - (max_steps - length)) / length if length else 0.0
    left = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.min_lr + (config.lr - config.min_lr) * left


@dataclass
class GuardedOptimizer:
    """Clips, and steps only where loss and gradient are finite. Both are sums over all ranks, so that all agree."""

    optimizer: torch.optim.Optimizer
    config: OptimizerConfig
    max_steps: int
    max_skipped: int
    skipped: int = 0
    """Steps skipped since the start of the process."""
    skipped_in_a_row: int = 0

    def step(self, step: int, loss: float) -> dict[str, float]:
        """Take or skip optimiser step `step` whose batch had `loss`; gradients are freed either way.

        Raises:
            InfrastructureFailure: more than `max_skipped` steps in a row were skipped.
        """
        lr = learning_rate(self.config, step, self.max_steps)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = clip_gradients(parameters, self.config.max_grad_norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._count(step, finite, loss, norm)
        return {"optim/grad_norm": norm, "optim/lr": lr, "optim/skipped": float(self.skipped)}

    def _count(self, step: int, finite: bool, loss: float, norm: float) -> None:
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row > self.max_skipped:
            raise InfrastructureFailure(
                f"{self.skipped_in_a_row} steps in a row up to step {step} had a loss or gradient that is not finite "
                f"(loss {loss}, gradient norm {norm}): lower optimizer.lr, or try trainer.dtype=float32"
            )
