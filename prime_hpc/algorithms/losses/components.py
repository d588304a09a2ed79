"""The three components of the loss, each summed over a row: policy gradient, cross-entropy, reference KL."""

import torch
from torch import Tensor

from prime_hpc.algorithms.losses.ratio import Ratio, exp_where
from prime_hpc.algorithms.losses.surrogates import Surrogate, Tokens, surrogate
from prime_hpc.algorithms.losses.tensors import Metrics, MicroBatchTensors, pair
from prime_hpc.config.loss import PolicyGradient

REF_KL_MASK_LOW = 0.2
"""The reference KL drops a token whose probability fell by more than this since sampling."""
REF_KL_TAU = 1e-3
"""Factor of the reference KL on the squared log-ratio between trainer and sampler."""


def policy_gradient(
    logprobs: Tensor, ratio: Ratio, tensors: MicroBatchTensors, config: PolicyGradient
) -> tuple[Tensor, Metrics]:
    """The surrogate with its penalties over the members of rl; of each sequence its mean where `normalise` says so.

    Raises:
        ValueError: `ref_tau` without reference log-probabilities.
    """
    members = tensors.rl_members
    advantages = torch.where(members, config.adv_tau * tensors.advantages, 0.0)
    made = surrogate(config, Tokens(tensors, logprobs, ratio, advantages, members))
    loss = made.loss + config.kl_tau * torch.where(members, ratio.log, 0.0).square()
    metrics = _drop_metrics(made, ratio, advantages, tensors)
    if config.ref_tau:
        divergence = _divergence(logprobs, _reference(tensors, members), members)
        loss = loss + config.ref_tau * divergence
        metrics["reference/kl"] = pair(divergence, members)
    if tensors.rl_weights is not None:
        loss = loss * torch.where(members, tensors.rl_weights, 0.0)
    if config.normalise == "sequence":
        loss = loss / tensors.sequences.spread(tensors.sequences.count(members))
    return loss.sum(), metrics


def cross_entropy(logprobs: Tensor, tensors: MicroBatchTensors) -> tuple[Tensor, Metrics]:
    """`-w log pi` over the members of ce."""
    members = tensors.ce_members
    nll = -torch.where(members, logprobs, 0.0)
    loss = nll.sum() if tensors.ce_weights is None else (nll * tensors.ce_weights).sum()
    return loss, {"nll": pair(nll, members)}


def reference_kl(logprobs: Tensor, ratio: Ratio, tensors: MicroBatchTensors) -> tuple[Tensor, Metrics]:
    """On-policy distillation: the log-ratio to the reference takes the place of the advantage.

    Raises:
        ValueError: members without reference log-probabilities.
    """
    members = tensors.ref_kl_members
    reference = tensors.logprobs if tensors.ref_kl_weights is None else _reference(tensors, members)
    dropped = members & (ratio.delta < -REF_KL_MASK_LOW)
    kept = members & ~dropped
    gain = torch.where(members, reference - logprobs.detach(), 0.0)
    loss = REF_KL_TAU * torch.where(members, ratio.log, 0.0).square() - gain * exp_where(kept, ratio.log)
    if tensors.ref_kl_weights is not None:
        loss = loss * tensors.ref_kl_weights
    return loss.sum(), {
        "ref_kl": pair(-gain, members),
        "ref_kl/is_masked": pair(dropped, members),
        "ref_kl/masked_mismatch_kl": pair(ratio.k3, dropped),
        "ref_kl/unmasked_mismatch_kl": pair(ratio.k3, kept),
    }


def _divergence(logprobs: Tensor, reference: Tensor, members: Tensor) -> Tensor:
    """[n]: `exp(d) - d - 1` for d = log rho - log pi on `members`, an estimate of KL(trainer || reference) that is
    never negative (GRPO; Shao et al. 2024, arXiv 2402.03300, eq. 4)."""
    log = torch.where(members, reference - logprobs, 0.0)
    return log.exp() - log - 1


def _reference(tensors: MicroBatchTensors, members: Tensor) -> Tensor:
    """[n]: the reference's log-probabilities; the sampler's stand in where no token needs one."""
    if tensors.ref_logprobs is not None:
        return tensors.ref_logprobs
    if bool(members.any()):
        raise ValueError("tokens that need a reference have no ref_logprobs: score the samples under the reference")
    return tensors.logprobs


def _drop_metrics(made: Surrogate, ratio: Ratio, advantages: Tensor, tensors: MicroBatchTensors) -> Metrics:
    dropped, members = made.dropped, tensors.rl_members
    return {
        **tensors.pairs("is_masked", dropped, members),
        "is_masked_low": pair(dropped & (advantages < 0), members),
        "is_masked_high": pair(dropped & (advantages > 0), members),
        "is_clipped": pair(made.clipped, members),
        "masked_mismatch_kl": pair(ratio.k3, dropped),
        "unmasked_mismatch_kl": pair(ratio.k3, members & ~dropped),
        "masked_advantage_positive": pair(advantages > 0, dropped),
        "masked_advantage_negative": pair(advantages < 0, dropped),
    }
