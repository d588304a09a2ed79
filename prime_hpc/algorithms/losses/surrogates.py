"""Policy-gradient surrogates, one loss a token. All compare the trainer with the sampler of that very token.

A batch is one optimiser step, so the policy "before the update" is the trainer itself: losses that papers write with
three policies (new, old, sampler) have two here, and what they clip is the ratio to the sampler, staleness included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prime_hpc.algorithms.losses.ratio import Ratio, exp_where
from prime_hpc.algorithms.losses.tensors import MicroBatchTensors
from prime_hpc.config.loss import DPPOLoss, GSPOLoss, ImportanceLoss, IPOLoss, PolicyGradient, PPOLoss


@dataclass(frozen=True)
class Surrogate:
    """`loss` [n], to be minimised, 0 outside the members; `dropped` bool[n], members without a gradient; `clipped`
    bool[n], members whose weight was moved to a bound and that keep a gradient."""

    loss: Tensor
    dropped: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class Tokens:
    """What a surrogate reads: [n] each, of `row`; advantages are 0 outside the members."""

    row: MicroBatchTensors
    logprobs: Tensor
    ratio: Ratio
    advantages: Tensor
    members: Tensor


def surrogate(config: PolicyGradient, tokens: Tokens) -> Surrogate:
    """The surrogate that `config` chooses."""
    match config:
        case DPPOLoss():
            return dppo(tokens, config.mask_low, config.mask_high)
        case IPOLoss():
            return _masked(tokens, tokens.ratio.delta.abs() > config.ipo_threshold)
        case PPOLoss():
            return _clipped(tokens, tokens.ratio.log, config.clip_low, config.clip_high)
        case GSPOLoss():
            return gspo(tokens, config.clip_low, config.clip_high)
        case ImportanceLoss():
            return importance(tokens, config)
    raise TypeError(f"{type(config).__name__} has no surrogate")


def dppo(tokens: Tokens, low: float, high: float) -> Surrogate:
    """`-A r`, without tokens whose probability has moved too far in the direction that A pushes.

    The binary total-variation mask of DPPO (Qi et al. 2026, arXiv 2602.04879): of the divergence only what the sampled
    token shows, `|p - q|`, is known. Advantage 0 counts as negative.
    """
    delta = tokens.ratio.delta
    return _masked(tokens, torch.where(tokens.advantages > 0, delta > high, delta < -low))


def gspo(tokens: Tokens, low: float, high: float) -> Surrogate:
    """Clipped surrogate over `s = (prod r)^(1/n)` of each sequence (Zheng et al. 2025, arXiv 2507.18071, eq. 5-7).

    Written token by token as in GSPO-token (eq. 13-14), so that advantages may differ within a sequence; where they do
    not, both have the same value and gradient.
    """
    log, sequences = tokens.ratio.log, tokens.row.sequences
    still = log.detach()
    mean = sequences.sum(still, tokens.members) / sequences.count(tokens.members)
    return _clipped(tokens, sequences.spread(mean) + log - still, low, high)


def importance(tokens: Tokens, config: ImportanceLoss) -> Surrogate:
    """`-w A log pi` with a constant weight w made from the ratio.

    AIPO (Wu et al. 2025, arXiv 2505.24034), CISPO (MiniMax 2025, arXiv 2506.13585) and TIS (Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training") clip it; IcePop (Ling team 2025, arXiv
    2510.18855) and MIS (Liu et al. 2025, "When speed kills stability") drop what lies outside.
    """
    weight = _level(tokens, config).exp()
    outside = tokens.members & ((weight < config.low) | (weight > config.high))
    nowhere = torch.zeros_like(outside)
    score = torch.where(tokens.members, tokens.logprobs, 0.0)
    if config.bound == "clip":
        weight = weight.clamp(config.low, config.high)
        return Surrogate(-weight * tokens.advantages * score, nowhere, outside)
    weight = torch.where(tokens.members & ~outside, weight, 0.0)
    return Surrogate(-weight * tokens.advantages * score, outside, nowhere)


def _level(tokens: Tokens, config: ImportanceLoss) -> Tensor:
    """[n]: logarithm of the ratio of each token, of its sequence, or of the sequence's geometric mean."""
    log = tokens.ratio.log.detach()
    if config.level == "token":
        return log
    sequences = tokens.row.sequences
    total = sequences.sum(log, tokens.members)
    return sequences.spread(total if config.level == "sequence" else total / sequences.count(tokens.members))


def _masked(tokens: Tokens, outside: Tensor) -> Surrogate:
    """`-A r` on the members that are not `outside`."""
    ratio = exp_where(tokens.members & ~outside, tokens.ratio.log)
    return Surrogate(-tokens.advantages * ratio, tokens.members & outside, torch.zeros_like(outside))


def _clipped(tokens: Tokens, log: Tensor, low: float, high: float) -> Surrogate:
    """`-min(r A, clip(r, 1 - low, 1 + high) A)` for r = exp(log) (PPO; Schulman et al. 2017, eq. 7; separate bounds:
    DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.1). Where the clipped term is the smaller one it is a constant."""
    ratio, advantages = log.detach().exp(), tokens.advantages
    beyond = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    dropped = tokens.members & beyond
    constant = torch.where(dropped, ratio.clamp(1 - low, 1 + high), 0.0)
    kept = exp_where(tokens.members & ~beyond, log)
    return Surrogate(-advantages * (kept + constant), dropped, torch.zeros_like(dropped))
