"""The loss of a micro-batch: its components over the normalisers of the whole batch."""

from torch import Tensor

from prime_hpc.algorithms.losses.components import cross_entropy, policy_gradient, reference_kl
from prime_hpc.algorithms.losses.custom import custom_loss
from prime_hpc.algorithms.losses.ratio import Ratio
from prime_hpc.algorithms.losses.tensors import Metrics, MicroBatchTensors, TokenCounts
from prime_hpc.config.loss import CustomLoss, LossConfig, PolicyGradient


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
        and metrics, the same names for every micro-batch but for sources; a name without members has count 0.

    Raises:
        ValueError: a token that needs a reference log-probability has none.
        ConfigurationError: the custom loss cannot be imported.
    """
    ratio = Ratio.of(logprobs, tensors)
    if isinstance(loss_config, CustomLoss):
        rl, metrics = custom_loss(logprobs, tensors, loss_config)
    else:
        rl, metrics = policy_gradient(logprobs, ratio, tensors, loss_config)
    ce, ce_metrics = cross_entropy(logprobs, tensors)
    ref_kl, ref_metrics = reference_kl(logprobs, ratio, tensors)
    total = rl / _rl_normaliser(loss_config, counts) + ce / max(counts.ce, 1) + ref_kl / max(counts.ref_kl, 1)
    metrics = {**metrics, **ce_metrics, **ref_metrics, **_mismatch(ratio, tensors, current_version)}
    if entropy is not None:
        metrics |= tensors.pairs("entropy", entropy, tensors.mask)
    return total, metrics


def _rl_normaliser(config: PolicyGradient | CustomLoss, counts: TokenCounts) -> int:
    """N_rl: tokens (DAPO, section 3.3), sequences (GRPO, eq. 3), or sequences of a constant length (Dr. GRPO)."""
    if config.normalise == "token":
        return max(counts.rl, 1)
    length = config.length if isinstance(config, PolicyGradient) and config.normalise == "length" else 1
    return max(counts.rl_sequences, 1) * (length or 1)


def _mismatch(ratio: Ratio, tensors: MicroBatchTensors, current_version: int) -> Metrics:
    """`mismatch_kl` over all tokens of rl and ref_kl; `mismatch/abs_mean` where trainer and sampler had the same
    weights."""
    on_policy = tensors.mask & (tensors.versions == current_version)
    return {
        **tensors.pairs("mismatch_kl", ratio.k3, tensors.mask & (tensors.rl_members | tensors.ref_kl_members)),
        **tensors.pairs("mismatch/abs_mean", ratio.log.abs(), on_policy),
    }
