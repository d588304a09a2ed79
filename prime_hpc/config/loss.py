"""Configuration of the policy-gradient loss: one dataclass a family, chosen by `loss.name` (docs/algorithms.md)."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from prime_hpc.config.sections import FORBID_UNKNOWN, ImportPath, Positive

Bound = Annotated[float, Field(ge=0)]


@dataclass(kw_only=True)
class PolicyGradient:
    """What every loss but `custom` has."""

    __pydantic_config__ = FORBID_UNKNOWN

    normalise: Literal["token", "sequence", "length"] = "token"
    """token: mean over tokens. sequence: mean over sequences of their means over tokens. length: sum over tokens,
    divided by the number of sequences times `length`."""
    length: Positive | None = None
    """normalise=length: tokens that every sequence counts for."""
    adv_tau: float = 1.0
    """Factor on advantages."""
    kl_tau: Bound = 0.0
    """Factor on the squared log-ratio between trainer and sampler."""
    ref_tau: Bound = 0.0
    """Factor on the KL divergence from `reference`."""
    reference: str | None = None
    """Name of the `frozen` model that `ref_tau` pulls to."""


@dataclass(kw_only=True)
class DPPOLoss(PolicyGradient):
    """Probability-difference mask in the direction of the advantage, and a quadratic KL."""

    name: Literal["default"] = "default"
    """The loss."""
    mask_low: Bound = 0.2
    """Drops a token with advantage <= 0 whose probability fell by more than this since sampling."""
    mask_high: Bound = 0.2
    """Drops a token with advantage > 0 whose probability rose by more than this since sampling."""
    kl_tau: Bound = 1e-3
    """Factor on the squared log-ratio between trainer and sampler."""


@dataclass(kw_only=True)
class IPOLoss(PolicyGradient):
    """Probability-difference mask either way, and a quadratic KL."""

    name: Literal["ipo"] = "ipo"
    """The loss."""
    ipo_threshold: Bound = 0.1
    """Drops a token whose probability moved by more than this either way."""
    kl_tau: Bound = 1e-3
    """Factor on the squared log-ratio between trainer and sampler."""


@dataclass(kw_only=True)
class PPOLoss(PolicyGradient):
    """Clipped surrogate over the ratio of each token: PPO, GRPO, DAPO and Dr. GRPO."""

    name: Literal["ppo"] = "ppo"
    """The loss."""
    clip_low: Bound = 0.2
    """The ratio counts down to 1 - clip_low."""
    clip_high: Bound = 0.2
    """The ratio counts up to 1 + clip_high."""


@dataclass(kw_only=True)
class GSPOLoss(PolicyGradient):
    """Clipped surrogate over the geometric mean of a sequence's ratios."""

    name: Literal["gspo"] = "gspo"
    """The loss."""
    clip_low: Bound = 3e-4
    """The sequence's ratio counts down to 1 - clip_low."""
    clip_high: Bound = 4e-4
    """The sequence's ratio counts up to 1 + clip_high."""
    normalise: Literal["token", "sequence", "length"] = "sequence"
    """As in every loss; the paper takes sequences."""


@dataclass(kw_only=True)
class ImportanceLoss(PolicyGradient):
    """Score function times a bounded importance weight: AIPO, CISPO, TIS, MIS and IcePop."""

    name: Literal["importance"] = "importance"
    """The loss."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Of the weight: each token's ratio, the product over its sequence, or the geometric mean over it."""
    bound: Literal["clip", "mask"] = "clip"
    """Where the weight leaves [low, high]: clip moves it to the nearer end, mask drops the token."""
    low: Bound = 0.0
    """Least weight."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Greatest weight."""


@dataclass(kw_only=True)
class CustomLoss:
    """A function of yours, called for every sequence."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Literal["custom"] = "custom"
    """The loss."""
    import_path: ImportPath
    """`module.function` that takes `LossInputs` and returns `LossOutputs`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function."""
    normalise: Literal["token", "sequence"] = "token"
    """What the sum of the function's results is divided by: tokens or sequences of the batch."""


LossConfig = Annotated[
    DPPOLoss | IPOLoss | PPOLoss | GSPOLoss | ImportanceLoss | CustomLoss, Field(discriminator="name")
]
