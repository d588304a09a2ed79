"""Every loss against its paper, written out naively in float64; and what no loss may depend on."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from prime_hpc.algorithms.losses import MicroBatchTensors, TokenCounts, compute_loss, count_tokens
from prime_hpc.algorithms.packing import pack
from prime_hpc.config.loss import (
    CustomLoss,
    DPPOLoss,
    GSPOLoss,
    ImportanceLoss,
    IPOLoss,
    LossConfig,
    PPOLoss,
)
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, Sample
from tests.loss_support import CURRENT, row, run

LENGTHS = [5, 1, 8, 3, 6]


class Rollouts:
    """Sequences with every kind of token: outside the mask, advantage 0, ratios far off and near 1."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        n = sum(LENGTHS)
        self.logprobs = torch.tensor(-rng.exponential(1.0, n))
        self.sampler = self.logprobs + torch.tensor(rng.choice([0.002, 0.3, 1.5], n) * rng.normal(size=n))
        self.reference = torch.tensor(-rng.exponential(1.0, n))
        self.advantages = torch.tensor(rng.choice([-1.5, -0.5, 0.0, 0.5, 1.0], n))
        self.mask = torch.tensor(rng.random(n) < 0.75)
        self.mask[sum(LENGTHS[:3]) : sum(LENGTHS[:4])] = False

    def tensors(self, **streams) -> MicroBatchTensors:
        return row(self.mask.tolist(), LENGTHS, logprobs=self.sampler, advantages=self.advantages,
                   ref_logprobs=self.reference, **streams)  # fmt: skip

    def sequences(self, logprobs: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """logprobs, sampler, reference and advantages of the masked tokens of each sequence that has any."""
        streams = [s.split(LENGTHS) for s in (logprobs, self.sampler, self.reference, self.advantages, self.mask)]
        parts = [tuple(s[keep] for s in rest) for *rest, keep in zip(*streams, strict=True)]
        return [part for part in parts if len(part[0])]


TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""logprobs, sampler, reference, advantages of one sequence -> the loss of each of its tokens."""


def ppo(low: float, high: float) -> TokenLoss:
    def loss(new: Tensor, old: Tensor, _: Tensor, advantages: Tensor) -> Tensor:
        ratio = torch.exp(new - old)
        return -torch.min(ratio * advantages, torch.clip(ratio, 1 - low, 1 + high) * advantages)

    return loss


def ppo_with_reference(new: Tensor, old: Tensor, reference: Tensor, advantages: Tensor) -> Tensor:
    k3 = torch.exp(reference) / torch.exp(new) - torch.log(torch.exp(reference) / torch.exp(new)) - 1
    return ppo(0.2, 0.2)(new, old, reference, advantages) + 0.04 * k3


def gspo(new: Tensor, old: Tensor, _: Tensor, advantages: Tensor) -> Tensor:
    """With equal advantages in a sequence: the sequence's objective, for each of its tokens."""
    ratio = (torch.exp(new).prod() / torch.exp(old).prod()) ** (1 / len(new))
    return -torch.min(ratio * advantages, torch.clip(ratio, 0.95, 1.1) * advantages)


def dppo(new: Tensor, old: Tensor, _: Tensor, advantages: Tensor) -> Tensor:
    p, q = torch.exp(new), torch.exp(old)
    keep = [not (d > 0.15 if a > 0 else d < -0.1) for d, a in zip((p - q).tolist(), advantages.tolist(), strict=True)]
    return -torch.where(torch.tensor(keep), p / q, 0.0) * 2 * advantages + 0.01 * (torch.log(p) - torch.log(q)) ** 2


def ipo(new: Tensor, old: Tensor, _: Tensor, advantages: Tensor) -> Tensor:
    p, q = torch.exp(new), torch.exp(old)
    return -torch.where((p - q).abs() <= 0.1, p / q, 0.0) * advantages + 1e-3 * (new - old) ** 2


def weighted(weight: Callable[[Tensor], Tensor]) -> TokenLoss:
    """Score function with a constant weight made from the ratios of a sequence."""

    def loss(new: Tensor, old: Tensor, _: Tensor, advantages: Tensor) -> Tensor:
        return -weight(torch.exp(new - old).detach()) * advantages * new

    return loss


def sequence_mask(high: float, power: Callable[[int], float]) -> Callable[[Tensor], Tensor]:
    def weight(ratios: Tensor) -> Tensor:
        whole = ratios.prod() ** power(len(ratios))
        return (whole if whole <= high else whole * 0) * torch.ones_like(ratios)

    return weight


CASES: list[tuple[LossConfig, TokenLoss]] = [
    (PPOLoss(clip_low=0.2, clip_high=0.28), ppo(0.2, 0.28)),
    (PPOLoss(normalise="sequence"), ppo(0.2, 0.2)),
    (PPOLoss(normalise="length", length=7), ppo(0.2, 0.2)),
    (PPOLoss(ref_tau=0.04, normalise="sequence"), ppo_with_reference),
    (DPPOLoss(mask_low=0.1, mask_high=0.15, adv_tau=2.0, kl_tau=0.01), dppo),
    (DPPOLoss(mask_low=0.1, mask_high=0.15, adv_tau=2.0, kl_tau=0.01, normalise="sequence"), dppo),
    (IPOLoss(), ipo),
    (ImportanceLoss(high=1.3), weighted(lambda r: r.clip(max=1.3))),
    (ImportanceLoss(low=0.8, high=1.3), weighted(lambda r: r.clip(0.8, 1.3))),
    (ImportanceLoss(bound="mask", low=0.5, high=2.0), weighted(lambda r: r * ((r >= 0.5) & (r <= 2.0)))),
    (ImportanceLoss(level="sequence", high=1.5), weighted(lambda r: r.prod().clip(max=1.5) * torch.ones_like(r))),
    (ImportanceLoss(level="sequence", bound="mask", high=1.5), weighted(sequence_mask(1.5, lambda n: 1.0))),
    (ImportanceLoss(level="geometric", bound="mask", high=1.05), weighted(sequence_mask(1.05, lambda n: 1 / n))),
]
GSPO_CASE = (GSPOLoss(clip_low=0.05, clip_high=0.1), gspo)


def mean_of(config: LossConfig, parts: list[Tensor]) -> Tensor:
    """The batch loss from the token losses of each sequence."""
    if config.normalise == "token":
        return torch.cat(parts).mean()
    if config.normalise == "sequence":
        return torch.stack([part.mean() for part in parts]).mean()
    return torch.stack([part.sum() / config.length for part in parts]).mean()


def named(case: tuple[LossConfig, TokenLoss]) -> str:
    config = case[0]
    return "-".join(str(part) for part in (config.name, config.normalise, getattr(config, "level", ""),
                                           getattr(config, "bound", "")) if part)  # fmt: skip


def counts_of(mask: Tensor) -> TokenCounts:
    return TokenCounts(int(mask.sum()), 0, 0, sum(bool(part.any()) for part in mask.split(LENGTHS)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", [*CASES, GSPO_CASE], ids=named)
def test_value_and_gradient_are_the_papers(case: tuple[LossConfig, TokenLoss], seed: int) -> None:
    config, token_loss = case
    rollouts = Rollouts(seed)
    if isinstance(config, GSPOLoss):
        rollouts.advantages = torch.tensor(np.repeat([1.0, -1.0, -0.5, 1.0, 0.5], LENGTHS))
    leaf = rollouts.logprobs.clone().requires_grad_()
    expected = mean_of(config, [token_loss(*part) for part in rollouts.sequences(leaf)])
    expected.backward()
    loss, gradient, _ = run(rollouts.tensors(), counts_of(rollouts.mask), config, rollouts.logprobs.tolist())
    assert loss == pytest.approx(expected.item(), rel=1e-12, abs=1e-14)
    assert gradient == pytest.approx(leaf.grad.tolist(), rel=1e-12, abs=1e-14)


def test_the_cases_reach_every_branch() -> None:
    rollouts = Rollouts(0)
    for config in (PPOLoss(), GSPOLoss(clip_low=0.05, clip_high=0.1), ImportanceLoss(bound="mask", low=0.5, high=2.0)):
        metrics = run(rollouts.tensors(), counts_of(rollouts.mask), config, rollouts.logprobs.tolist())[2]
        dropped, members = metrics["is_masked"]
        assert 0 < dropped < members == rollouts.mask.sum()
        assert metrics["masked_advantage_positive"][0] + metrics["masked_advantage_negative"][0] <= dropped


def test_clipped_weights_are_counted_and_keep_their_gradient() -> None:
    rollouts = Rollouts(0)
    config = ImportanceLoss(high=1.3)
    _, gradient, metrics = run(rollouts.tensors(), counts_of(rollouts.mask), config, rollouts.logprobs.tolist())
    ratio = torch.exp(rollouts.logprobs - rollouts.sampler)
    assert metrics["is_clipped"] == (int((rollouts.mask & (ratio > 1.3)).sum()), int(rollouts.mask.sum()))
    assert metrics["is_masked"][0] == 0
    trains = rollouts.mask & (rollouts.advantages != 0)
    assert (torch.tensor(gradient) != 0).tolist() == trains.tolist()


def test_gspo_takes_an_advantage_of_each_token() -> None:
    """GSPO-token, eq. 17 of its gradient: `s A_t grad log pi_t / n` while the sequence is inside its bounds."""
    logprobs, sampler, advantages = [-0.5, -1.0, -0.7], [-0.6, -0.9, -0.75], [1.0, 0.5, 2.0]
    tensors = row([1, 1, 1], [3], logprobs=torch.tensor(sampler).double(), advantages=torch.tensor(advantages).double())
    _, gradient, _ = run(tensors, TokenCounts(3, 0, 0, 1), GSPOLoss(clip_high=0.5), logprobs)
    ratio = np.exp(np.mean(np.array(logprobs) - np.array(sampler)))
    assert gradient == pytest.approx([-ratio * a / 3 for a in advantages])


def test_reference_divergence_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="no ref_logprobs"):
        run(row(), TokenCounts(8, 0, 0, 2), PPOLoss(ref_tau=0.1))


def test_weights_scale_a_token_without_changing_the_normaliser() -> None:
    rollouts = Rollouts(1)
    whole = run(rollouts.tensors(), counts_of(rollouts.mask), PPOLoss(), rollouts.logprobs.tolist())
    half = torch.full((sum(LENGTHS),), 0.5, dtype=torch.float64)
    halved = run(rollouts.tensors(rl_weights=half), counts_of(rollouts.mask), PPOLoss(), rollouts.logprobs.tolist())
    assert halved[0] == pytest.approx(whole[0] / 2)
    assert halved[1] == pytest.approx([g / 2 for g in whole[1]])


@pytest.mark.parametrize("name", ["default", "ppo", "gspo", "importance"])
def test_far_ratios_outside_the_bounds_leave_a_finite_gradient(name: str) -> None:
    config = {"default": DPPOLoss(kl_tau=0), "ppo": PPOLoss(), "gspo": GSPOLoss(), "importance": ImportanceLoss()}[name]
    tensors = row([1, 1], [2], logprobs=torch.tensor([-900.0, -0.5]), advantages=torch.tensor([1.0, 1.0]))
    _, gradient, _ = run(tensors, TokenCounts(2, 0, 0, 1), config, [-0.1, -0.5])
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("bound", ["mask", "clip"])
def test_a_sequence_whose_ratio_overflows_does_not_poison_its_other_tokens(bound: str) -> None:
    config = ImportanceLoss(level="sequence", bound=bound, high=2.0)
    sampler, advantages = torch.full((3,), -900.0).double(), torch.tensor([5.0, 1.0, 1.0]).double()
    tensors = row([0, 1, 1], [3], logprobs=sampler, advantages=advantages)
    loss, gradient, _ = run(tensors, TokenCounts(2, 0, 0, 1), config, [-0.1, -0.1, -0.1])
    weight = 2.0 if bound == "clip" else 0.0
    assert loss == pytest.approx(weight * 0.1)
    assert gradient == pytest.approx([0, -weight / 2, -weight / 2])


def samples_of(rollouts: Rollouts) -> list[Sample]:
    """The same sequences as the orchestrator ships them, some tokens in other components."""
    streams = [s.split(LENGTHS) for s in (rollouts.mask, rollouts.sampler, rollouts.advantages, rollouts.reference)]
    samples, start = [], 0
    for i, (mask, sampler, advantages, reference) in enumerate(zip(*streams, strict=True)):
        n = LENGTHS[i]
        samples.append(Sample(
            sample_id=str(i), source="a", token_ids=Array.of(range(start, start + n), "i4"),
            mask=Array.of(mask, "bool"), logprobs=Array.of(sampler, "f4"),
            versions=Array.of([NOT_SAMPLED] * n, "i8"),
            advantages=Array.of(advantages, "f4"), ref_logprobs=Array.of(reference, "f4"),
            ce_weights=Array.of([0.5] + [0] * (n - 1), "f4") if i % 2 else None,
            ref_kl_weights=Array.of([0] * (n - 1) + [1], "f4") if i == 2 else None))  # fmt: skip
        start += n
    return samples


def loss_of_batch(samples: list[Sample], ranks: int, row_tokens: int, logprobs: Tensor, config: LossConfig):
    """Loss and gradient [n] of a packed batch, summed over ranks and micro-batches as the trainer sums them."""
    packed = pack(samples, ranks, row_tokens)
    counts = TokenCounts.from_tensor(sum(count_tokens(micros).tensor() for micros in packed))
    leaf, total = logprobs.clone().requires_grad_(), torch.zeros(())
    for micro in (micro for micros in packed for micro in micros):
        tensors = MicroBatchTensors.of(micro, "cpu")
        loss, _ = compute_loss(leaf[tensors.token_ids], None, tensors, config, counts, CURRENT)
        total = total + loss
    total.backward()
    return total.item(), leaf.grad.tolist()


EVERY_LOSS = [*(config for config, _ in CASES), GSPO_CASE[0],
              CustomLoss(import_path=f"{__name__}.mean_of_sequence", normalise="sequence")]  # fmt: skip


def mean_of_sequence(inputs):
    from prime_hpc.algorithms.losses import LossOutputs

    score = torch.where(inputs.loss_mask, inputs.trainer_logprobs * inputs.advantages, 0.0).sum()
    return LossOutputs(-score / inputs.loss_mask.sum().clamp(min=1))


@pytest.mark.parametrize("config", EVERY_LOSS, ids=lambda c: named((c, ppo)))
def test_order_ranks_rows_and_dummies_change_nothing(config: LossConfig) -> None:
    rollouts = Rollouts(2)
    samples, logprobs = samples_of(rollouts), rollouts.logprobs
    loss, gradient = loss_of_batch(samples, 1, sum(LENGTHS), logprobs, config)
    shuffled = [samples[i] for i in (3, 0, 4, 2, 1)]
    for other in ((shuffled, 1, sum(LENGTHS)), (samples, 2, 12), (samples, 3, 8), (shuffled, 7, 8)):
        again = loss_of_batch(*other, logprobs, config)
        assert again[0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert again[1] == pytest.approx(gradient, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("config", EVERY_LOSS, ids=lambda c: named((c, ppo)))
def test_padding_changes_nothing(config: LossConfig) -> None:
    rollouts = Rollouts(2)
    samples, n = samples_of(rollouts), sum(LENGTHS)
    longer = [msgspec.structs.replace(s, **{name: padded(getattr(s, name), n) for name in STREAMS}) for s in samples]
    logprobs = torch.cat([rollouts.logprobs, torch.full((1,), -5.0, dtype=torch.float64)])
    loss, gradient = loss_of_batch(samples, 2, 12, logprobs, config)
    again = loss_of_batch(longer, 2, 16, logprobs, config)
    assert again[0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert again[1] == pytest.approx(gradient, rel=1e-5, abs=1e-7)


STREAMS = ("token_ids", "mask", "logprobs", "versions", "advantages", "ref_logprobs", "ce_weights",
           "ref_kl_weights")  # fmt: skip


def padded(stream: Array | None, pad_id: int) -> Array | None:
    """`stream` with two tokens more that belong to nothing."""
    if stream is None:
        return None
    fill = pad_id if stream.dtype == "i4" else NOT_SAMPLED if stream.dtype == "i8" else 0
    return Array.of(np.append(stream.numpy(), [fill, fill]), stream.dtype)
