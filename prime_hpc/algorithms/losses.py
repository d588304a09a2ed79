"""Losses over one packed row of tokens: policy gradient, cross-entropy, reference KL (formulas in docs/algorithms.md).

Everything is per token and vectorised over the row; only a custom loss sees one sequence at a time.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from prime_hpc.config.sections import LossConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import MicroBatch

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name -> (sum, count), float64 scalars: pairs of micro-batches and ranks add up to the pair of the whole batch."""

REF_KL_MASK_LOW = 0.2
"""The reference KL drops a token whose probability fell by more than this since sampling."""
REF_KL_TAU = 1e-3
"""Factor of the reference KL on the squared log-ratio between trainer and sampler."""


@dataclass(frozen=True)
class MicroBatchTensors:
    """A micro-batch on a device: tensors [n], n = sum(seq_lens). Absent weights mean what they mean in a `Sample`."""

    token_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    logprobs: Tensor
    versions: Tensor
    advantages: Tensor
    temperatures: Tensor
    seq_lens: list[int]
    sources: list[str]
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    ref_kl_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None

    @classmethod
    def of(cls, micro: MicroBatch, device: torch.device | str) -> "MicroBatchTensors":
        """Copy the streams of `micro` to `device`; ids, positions and versions become int64."""

        def load(array: Array, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(array.numpy(), dtype=dtype, device=device)

        def optional(array: Array | None) -> Tensor | None:
            return None if array is None else load(array)

        return cls(
            token_ids=load(micro.token_ids, torch.int64),
            position_ids=torch.tensor(micro.position_ids(), device=device),
            mask=load(micro.mask, torch.bool),
            logprobs=load(micro.logprobs),
            versions=load(micro.versions, torch.int64),
            advantages=load(micro.advantages),
            temperatures=load(micro.temperatures),
            seq_lens=micro.seq_lens,
            sources=micro.sources,
            rl_weights=optional(micro.rl_weights),
            ce_weights=optional(micro.ce_weights),
            ref_kl_weights=optional(micro.ref_kl_weights),
            ref_logprobs=optional(micro.ref_logprobs),
        )

    @property
    def rl_members(self) -> Tensor:
        """bool[n]: sampled tokens with a policy-gradient weight."""
        return self.mask if self.rl_weights is None else self.mask & (self.rl_weights != 0)

    @property
    def ce_members(self) -> Tensor:
        """bool[n]: tokens with a cross-entropy weight, sampled or not."""
        return _nonzero(self.ce_weights, self.mask)

    @property
    def ref_kl_members(self) -> Tensor:
        """bool[n]: tokens with a reference-KL weight, sampled or not."""
        return _nonzero(self.ref_kl_weights, self.mask)


@dataclass(frozen=True)
class TokenCounts:
    """Member tokens of each component over the whole batch, all ranks together: the normalisers of the loss."""

    rl: int
    ce: int
    ref_kl: int

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """int64[3], to be summed over ranks."""
        return torch.tensor([self.rl, self.ce, self.ref_kl], dtype=torch.int64, device=device)

    @classmethod
    def from_tensor(cls, counts: Tensor) -> "TokenCounts":
        return cls(*(int(n) for n in counts.tolist()))


def count_tokens(micro_batches: list[MicroBatch]) -> TokenCounts:
    """Member tokens of one rank's micro-batches."""

    def members(weights: Array | None) -> int:
        return 0 if weights is None else int(np.count_nonzero(weights.numpy()))

    rl = sum(int(np.count_nonzero(m.mask.numpy() & (m.rl_weights is None or m.rl_weights.numpy() != 0)))
             for m in micro_batches)  # fmt: skip
    return TokenCounts(rl, sum(members(m.ce_weights) for m in micro_batches),
                       sum(members(m.ref_kl_weights) for m in micro_batches))  # fmt: skip


@dataclass(frozen=True)
class LossInputs:
    """One sequence of k tokens, as a custom loss sees it; tensors are [k], `loss_mask` bool holds the member tokens.

    A sequence may have no member: its loss is then 0 and finite, still depending on `trainer_logprobs`.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


@dataclass(frozen=True)
class LossOutputs:
    """A custom loss: the *sum* over the sequence's member tokens (weights applied), and scalar metrics."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def compute_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    tensors: MicroBatchTensors,
    loss_config: LossConfig,
    counts: TokenCounts,
    current_version: int,
) -> tuple[Tensor, Metrics]:
    """This micro-batch's part of the batch loss, `rl / N_rl + ce / N_ce + ref_kl / N_ref`.

    Args:
        logprobs: [n], log-probability of token t itself at its sampling temperature, with gradient.
        entropy: [n] of the distribution that token t was drawn from, in nats.
        counts: of the whole batch, all ranks together; zero counts as one.
        current_version: packed `PolicyVersion` of the weights that computed `logprobs`.

    Returns:
        A scalar that has a gradient even where no token is a member (so that collectives of the backward pass match),
        and metrics, the same names for every micro-batch; a name without members has count 0.

    Raises:
        ValueError: a reference-KL member without reference log-probabilities.
        ConfigurationError: the custom loss cannot be imported.
    """
    ratio = _Ratio.of(logprobs, tensors)
    if loss_config.name == "custom":
        rl, metrics = _custom_loss(logprobs, tensors, loss_config)
    else:
        rl, metrics = _policy_gradient(ratio, tensors, loss_config)
    ce, ce_metrics = _cross_entropy(logprobs, tensors)
    ref_kl, ref_metrics = _reference_kl(logprobs, ratio, tensors)
    total = rl / max(counts.rl, 1) + ce / max(counts.ce, 1) + ref_kl / max(counts.ref_kl, 1)
    metrics = {**metrics, **ce_metrics, **ref_metrics, **_mismatch(ratio, tensors, current_version)}
    if entropy is not None:
        metrics["entropy"] = _pair(entropy, tensors.mask)
    return total, metrics


@dataclass(frozen=True)
class _Ratio:
    """Trainer against sampler, per token [n]; zeros (ratio 1) where no component needs them."""

    log: Tensor
    delta: Tensor
    """Difference of probabilities, without gradient."""
    k3: Tensor
    """`r - log r - 1`, without gradient: an unbiased estimate of KL(sampler || trainer) (Schulman 2020)."""

    @classmethod
    def of(cls, logprobs: Tensor, tensors: MicroBatchTensors) -> "_Ratio":
        scored = tensors.mask | tensors.ref_kl_members
        log = torch.where(scored, logprobs - tensors.logprobs, 0.0)
        still = log.detach()
        delta = torch.where(scored, logprobs.detach().exp() - tensors.logprobs.exp(), 0.0)
        return cls(log, delta, still.exp() - still - 1)

    def kept(self, keep: Tensor) -> Tensor:
        """exp(log) on `keep` and 0 elsewhere; masked before exp, where an overflow would make the gradient NaN."""
        return torch.where(keep, torch.where(keep, self.log, 0.0).exp(), 0.0)


def _policy_gradient(ratio: _Ratio, tensors: MicroBatchTensors, config: LossConfig) -> tuple[Tensor, Metrics]:
    """Masked importance-weighted policy gradient with a quadratic KL, summed over the row."""
    members, advantages = tensors.rl_members, tensors.advantages
    if config.name == "ipo":
        outside = ratio.delta.abs() > config.ipo_threshold
    else:
        outside = torch.where(advantages > 0, ratio.delta > config.mask_high, ratio.delta < -config.mask_low)
    dropped, kept = members & outside, members & ~outside
    loss = config.kl_tau * torch.where(members, ratio.log, 0.0).square()
    loss = loss - config.adv_tau * advantages * ratio.kept(kept)
    if tensors.rl_weights is not None:
        loss = loss * torch.where(members, tensors.rl_weights, 0.0)
    return loss.sum(), {
        "is_masked": _pair(dropped, members),
        "is_masked_low": _pair(dropped & (advantages < 0), members),
        "is_masked_high": _pair(dropped & (advantages > 0), members),
        "masked_mismatch_kl": _pair(ratio.k3, dropped),
        "unmasked_mismatch_kl": _pair(ratio.k3, kept),
        "masked_advantage_positive": _pair(advantages > 0, dropped),
        "masked_advantage_negative": _pair(advantages < 0, dropped),
    }


def _cross_entropy(logprobs: Tensor, tensors: MicroBatchTensors) -> tuple[Tensor, Metrics]:
    members = tensors.ce_members
    nll = -torch.where(members, logprobs, 0.0)
    loss = nll.sum() if tensors.ce_weights is None else (nll * tensors.ce_weights).sum()
    return loss, {"nll": _pair(nll, members)}


def _reference_kl(logprobs: Tensor, ratio: _Ratio, tensors: MicroBatchTensors) -> tuple[Tensor, Metrics]:
    """On-policy distillation: the log-ratio to the reference takes the place of the advantage."""
    members = tensors.ref_kl_members
    reference = tensors.ref_logprobs
    if reference is None:
        if tensors.ref_kl_weights is not None and bool(members.any()):
            raise ValueError("tokens of the ref_kl component have no ref_logprobs: score the sample with the reference")
        reference = tensors.logprobs
    dropped = members & (ratio.delta < -REF_KL_MASK_LOW)
    kept = members & ~dropped
    gain = torch.where(members, reference - logprobs.detach(), 0.0)
    loss = REF_KL_TAU * torch.where(members, ratio.log, 0.0).square() - gain * ratio.kept(kept)
    if tensors.ref_kl_weights is not None:
        loss = loss * tensors.ref_kl_weights
    return loss.sum(), {
        "ref_kl": _pair(-gain, members),
        "ref_kl/is_masked": _pair(dropped, members),
        "ref_kl/masked_mismatch_kl": _pair(ratio.k3, dropped),
        "ref_kl/unmasked_mismatch_kl": _pair(ratio.k3, kept),
    }


def _mismatch(ratio: _Ratio, tensors: MicroBatchTensors, current_version: int) -> Metrics:
    """`mismatch_kl` over all tokens of rl and ref_kl; `mismatch/abs` where trainer and sampler had the same weights."""
    on_policy = tensors.mask & (tensors.versions == current_version)
    return {
        "mismatch_kl": _pair(ratio.k3, tensors.mask & (tensors.rl_members | tensors.ref_kl_members)),
        "mismatch/abs": _pair(ratio.log.abs(), on_policy),
    }


def _custom_loss(logprobs: Tensor, tensors: MicroBatchTensors, config: LossConfig) -> tuple[Tensor, Metrics]:
    """Call the user's function on every sequence; a metric's count is the number of sequences."""
    function = _import_loss(config.import_path)
    streams = (logprobs, tensors.logprobs, tensors.ref_logprobs, tensors.advantages, tensors.rl_members,
               tensors.rl_weights)  # fmt: skip
    split = [[None] * len(tensors.seq_lens) if s is None else s.split(tensors.seq_lens) for s in streams]
    outputs = [function(LossInputs(*parts), **config.kwargs) for parts in zip(*split, strict=True)]
    names = sorted({name for output in outputs for name in output.metrics})
    metrics: Metrics = {}
    for name in names:
        values = torch.stack([o.metrics[name].detach().double() for o in outputs if name in o.metrics])
        metrics[name] = _pair(values, torch.ones_like(values, dtype=torch.bool))
    return torch.stack([output.loss for output in outputs]).sum(), metrics


@cache
def _import_loss(path: str | None) -> Callable[..., LossOutputs]:
    expected = "`module.function` of a loss that takes LossInputs and returns LossOutputs"
    module, _, name = (path or "").rpartition(".")
    if not module:
        raise ConfigurationError([ConfigProblem("loss.import_path", path, expected)])
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError([ConfigProblem("loss.import_path", path, f"{expected} ({error})")]) from error


def _nonzero(weights: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool) if weights is None else weights != 0


def _pair(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(where, values.detach().double(), 0.0).sum(), where.sum().double()
