"""Losses on a GPU are those on the CPU."""

import pytest
import torch

from prime_hpc.algorithms.losses import MicroBatchTensors, TokenCounts, compute_loss
from prime_hpc.config.loss import DPPOLoss, GSPOLoss, ImportanceLoss, IPOLoss, LossConfig, PPOLoss
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import MicroBatch

LENGTHS = [700, 1, 33, 290]
N = sum(LENGTHS)
LOSSES = [DPPOLoss(), IPOLoss(normalise="sequence"), PPOLoss(normalise="length", length=100), PPOLoss(ref_tau=0.1),
          GSPOLoss(clip_low=0.05, clip_high=0.1), ImportanceLoss(), ImportanceLoss(bound="mask", level="geometric"),
          ImportanceLoss(level="sequence")]  # fmt: skip


def micro_batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(5, N, generator=generator)
    return MicroBatch(
        token_ids=Array.of(range(N), "i4"), mask=Array.of(noise[0] > -0.5, "bool"),
        logprobs=Array.of(-noise[1].abs(), "f4"), versions=Array.of([0] * N, "i8"), advantages=Array.of(noise[2], "f4"),
        temperatures=Array.of([1.0] * N, "f4"), seq_lens=LENGTHS, sources=["a"] * len(LENGTHS),
        ce_weights=Array.of(noise[3] > 1, "f4"), ref_kl_weights=Array.of(noise[3] < -1, "f4"),
        ref_logprobs=Array.of(-noise[4].abs(), "f4"),
    )  # fmt: skip


def run(config: LossConfig, device: str) -> tuple[float, torch.Tensor]:
    tensors = MicroBatchTensors.of(micro_batch(), device)
    noise = 0.1 * torch.randn(N, generator=torch.Generator().manual_seed(1)).to(device)
    logprobs = (tensors.logprobs + noise).requires_grad_()
    loss, _ = compute_loss(logprobs, None, tensors, config, TokenCounts(600, 100, 100, 4), 0)
    loss.backward()
    return loss.item(), logprobs.grad.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("config", LOSSES, ids=lambda c: c.name)
def test_value_and_gradient_do_not_depend_on_the_device(config: LossConfig) -> None:
    (value, gradient), (expected, wanted) = run(config, "cuda"), run(config, "cpu")
    assert value == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-7)
