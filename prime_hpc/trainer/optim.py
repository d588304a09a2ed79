"""The schedule of the learning rate, and one guarded step of the optimisers."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer

from prime_hpc.config.optimizer import OptimizerConfig
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.trainer.parallel.clip import clip_gradients

WHOLE = ""
"""The tenant of a run that trains all weights rather than adapters."""


def learning_rate(config: OptimizerConfig, step: int, max_steps: int, peak: float | None = None) -> float:
    """The rate of `step`, counted from 1: a pure function, so a resumed run needs no state for it.

    Warm-up rises to `peak` (lr when left out) at step `warmup_steps`. wsd falls over the last `decay_steps` (warm-up,
    stable, decay; Hu et al. 2024, section 4.1), linear and cosine (Loshchilov & Hutter 2017) over all steps after the
    warm-up; all reach `min_lr` at `max_steps`. A run too short for warm-up and decay shortens the decay first.
    """
    peak = config.lr if peak is None else peak
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    after_warmup = max(0, max_steps - config.warmup_steps)
    decay_steps = {"constant": 0, "wsd": min(config.decay_steps, after_warmup)}
    length = decay_steps.get(config.schedule, after_warmup)
    done = max(0.0, step - (max_steps - length)) / length if length else 0.0
    left = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    lowest = min(config.min_lr, peak)
    return lowest + (peak - lowest) * left


@dataclass
class GuardedOptimizer:
    """Clips each tenant's gradient by itself (`WHOLE`, or every adapter), and steps it where its loss and gradient are
    finite. Both are sums over all ranks, so that all agree."""

    tenants: dict[str, list[Optimizer]]
    config: OptimizerConfig
    max_steps: int
    max_skipped: int
    scale: float = 1.0
    """Factor on every peak learning rate, where it was changed while the run worked."""
    skipped: int = 0
    """Steps since the start of the process in which a tenant was skipped."""
    skipped_in_a_row: int = 0

    @property
    def optimizers(self) -> list[Optimizer]:
        return [optimizer for optimizers in self.tenants.values() for optimizer in optimizers]

    def step(self, step: int, losses: dict[str, float]) -> dict[str, float]:
        """Take or skip optimiser step `step` of the tenants whose batch had `losses`; gradients are freed either way.

        Raises:
            InfrastructureFailure: more than `max_skipped` steps in a row were skipped.
        """
        norms = {}
        for tenant, loss in losses.items():
            optimizers = self.tenants[tenant]
            norms[tenant] = norm = self._clip(optimizers)
            if math.isfinite(loss) and math.isfinite(norm):
                self._advance(optimizers, step)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._count(step, losses, norms)
        adapters = {f"adapter/{tenant}/grad_norm": norm for tenant, norm in norms.items() if tenant != WHOLE}
        lr = self._rate(step, self.config.lr)
        return {"optim/grad_norm": math.hypot(*norms.values()), "optim/lr": lr, "optim/skipped": float(self.skipped),
                **adapters}  # fmt: skip

    def retune(self, lr: float) -> None:
        """Make `lr` the peak learning rate; groups with a peak of their own keep their proportion to it."""
        self.scale = lr / self.config.lr

    def _rate(self, step: int, peak: float) -> float:
        return learning_rate(self.config, step, self.max_steps, peak * self.scale)

    def _advance(self, optimizers: list[Optimizer], step: int) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate(step, group["peak_lr"])
            optimizer.step()

    def _clip(self, optimizers: list[Optimizer]) -> float:
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        return clip_gradients(parameters, self.config.max_grad_norm)

    def _count(self, step: int, losses: dict[str, float], norms: dict[str, float]) -> None:
        finite = all(math.isfinite(value) for value in (*losses.values(), *norms.values()))
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row > self.max_skipped:
            raise InfrastructureFailure(
                f"{self.skipped_in_a_row} steps in a row up to step {step} had a loss or gradient that is not finite "
                f"(loss {_brief(losses)}, gradient norm {_brief(norms)}): lower optimizer.lr, or try "
                "trainer.dtype=float32"
            )


def _brief(values: dict[str, float]) -> str:
    return ", ".join(f"{tenant} {value}".strip() for tenant, value in values.items())
