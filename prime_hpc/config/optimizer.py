"""Configuration of the optimiser: one dataclass an algorithm, chosen by `optimizer.name` (docs/optimizers.md)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative

Rate = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(kw_only=True)
class Descent:
    """What every optimiser has."""

    __pydantic_config__ = FORBID_UNKNOWN

    lr: Rate = 1e-6
    """Peak learning rate."""
    embedding_lr: Rate | None = None
    """Peak learning rate of embedding and LM head; lr when left out."""
    router_lr: Rate | None = None
    """Peak learning rate of the routers of a mixture of experts; lr when left out."""
    weight_decay: Rate = 0.0
    """Decoupled weight decay, of all but norms and biases."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global norm; null turns clipping off."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warm-up. constant; linear and cosine: decay to the end; wsd: stable, then decay over `decay_steps`."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    decay_steps: NonNegative = 0
    """Steps of linear decay at the end (schedule=wsd)."""
    min_lr: Rate = 0.0
    """Where the decay ends."""


@dataclass(kw_only=True)
class AdamW(Descent):
    """AdamW on all weights."""

    name: Literal["adamw"] = "adamw"
    """The optimiser."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""


@dataclass(kw_only=True)
class Muon(Descent):
    """Muon on hidden matrices, AdamW on embeddings, head, routers, norms and biases. Updates are as large as AdamW's,
    so that its learning rates fit."""

    name: Literal["muon"] = "muon"
    """The optimiser."""
    momentum: Decay = 0.95
    """Decay rate of Muon's momentum."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's part: decay rates of the two moments."""
    eps: float = 1e-8
    """AdamW's part: added to the root of the second moment."""


@dataclass(kw_only=True)
class SignSGD(Descent):
    """The sign of the gradient; keeps no state."""

    name: Literal["signsgd"] = "signsgd"
    """The optimiser."""


OptimizerConfig = Annotated[AdamW | Muon | SignSGD, Field(discriminator="name")]
