"""The losses against golden vectors in float64, and the rules that hold for every loss."""

import numpy as np
import pytest
import torch

from prime_hpc.algorithms.losses import (
    LossInputs,
    LossOutputs,
    MicroBatchTensors,
    TokenCounts,
    compute_loss,
    count_tokens,
)
from prime_hpc.config.loss import CustomLoss, DPPOLoss, IPOLoss
from prime_hpc.errors import ConfigurationError
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import MicroBatch, PolicyVersion
from tests.loss_support import ADVANTAGES, CURRENT, GRADIENT, LOGPROBS, MASK, REFERENCE, SAMPLER, double, row, run


def mean(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1]


def test_default_loss_and_gradient_are_the_golden_ones():
    loss, gradient, _ = run(row(), TokenCounts(8, 0, 0, 2))
    assert loss == pytest.approx(0.2533218669, abs=1e-10)
    assert gradient == pytest.approx(GRADIENT, abs=5e-9)


def test_cross_entropy_adds_to_the_policy_gradient():
    weights = double([0.1, 0, 0, 0, 0, 0, 0, 0, 0.1, 0])
    loss, gradient, metrics = run(row(ce_weights=weights), TokenCounts(8, 2, 0, 2))
    expected = list(GRADIENT)
    expected[0] -= 0.05
    expected[8] -= 0.05
    assert loss == pytest.approx(0.2933218669, abs=1e-10)
    assert gradient == pytest.approx(expected, abs=5e-9)
    assert metrics["nll"] == pytest.approx((0.10 + 0.70, 2))


def test_metrics_of_each_sequence_are_the_golden_ones_and_add_up_over_rows():
    whole = run(row(), TokenCounts(8, 0, 0, 2))[2]
    parts = []
    for span in (slice(0, 6), slice(6, 10)):
        one = row(MASK[span], [span.stop - span.start], logprobs=double(SAMPLER[span]),
                  advantages=double(ADVANTAGES[span]))  # fmt: skip
        parts.append(run(one, TokenCounts(8, 0, 0, 2), logprobs=LOGPROBS[span])[2])
    for name, golden in {
        "is_masked": [0.2, 1 / 3],
        "is_masked_high": [0.2, 0],
        "is_masked_low": [0, 1 / 3],
        "masked_mismatch_kl": [0.7183, 0.5012],
        "unmasked_mismatch_kl": [0.0657, 0.0948],
        "masked_advantage_positive": [1, 0],
        "masked_advantage_negative": [0, 1],
    }.items():
        assert [mean(part[name]) for part in parts] == pytest.approx(golden, abs=5e-5), name
    for name, pair in whole.items():
        assert pair == pytest.approx([sum(values) for values in zip(*(p[name] for p in parts), strict=True)]), name


def test_mismatch_counts_masked_tokens_of_the_current_version_only():
    versions = torch.full((10,), CURRENT)
    versions[[1, 2]] = PolicyVersion(0, 3).pack()
    metrics = run(row(versions=versions), TokenCounts(8, 0, 0, 2))[2]
    kept = [3, 4, 5, 6, 7, 9]
    assert metrics["mismatch/abs_mean"] == pytest.approx((sum(abs(LOGPROBS[i] - SAMPLER[i]) for i in kept), 6))
    assert metrics["mismatch_kl"][1] == 8


def test_ipo_drops_moves_either_way():
    config = IPOLoss(ipo_threshold=0.1, kl_tau=0.0)
    tensors = row([1, 1, 1], [3], logprobs=double([-0.5, -0.5, -0.5]), advantages=double([1.0, 1.0, 1.0]))
    moves = [-0.5 + 0.1, -0.5, -0.5 - 0.3]  # probability +0.064, 0, -0.157
    loss, gradient, metrics = run(tensors, TokenCounts(3, 0, 0, 2), config, logprobs=moves)
    kept = [float(np.exp(0.1)), 1.0]
    assert loss == pytest.approx(-sum(kept) / 3)
    assert gradient == pytest.approx([-kept[0] / 3, -1 / 3, 0])
    assert metrics["is_masked"] == (1, 3)


def test_reference_kl_by_hand():
    ones = torch.ones(10, dtype=torch.float64)
    tensors = row(rl_weights=ones * 0, ref_kl_weights=ones, ref_logprobs=double(REFERENCE))
    loss, _, metrics = run(tensors, TokenCounts(0, 0, 10, 2))
    log_ratio = np.array(LOGPROBS) - np.array(SAMPLER)
    dropped = np.exp(LOGPROBS) - np.exp(SAMPLER) < -0.2
    gain = np.array(REFERENCE) - np.array(LOGPROBS)
    expected = (1e-3 * log_ratio**2 - ~dropped * gain * np.exp(log_ratio)).sum() / 10
    assert dropped.tolist() == [i in (1, 9) for i in range(10)]
    assert loss == pytest.approx(expected, abs=1e-12)
    assert metrics["ref_kl/is_masked"] == (2, 10)
    assert metrics["ref_kl"] == pytest.approx((-gain.sum(), 10))
    assert metrics["is_masked"] == (0, 0)


def test_reference_kl_needs_reference_logprobs():
    with pytest.raises(ValueError, match="no ref_logprobs"):
        run(row(ref_kl_weights=torch.ones(10)), TokenCounts(8, 0, 10, 2))


@pytest.mark.parametrize(("weights", "count", "expected"), [([1.0, 0, 1.0], 2, 0.15), ([0.1, 0, 0.1], 1, 0.03)])
def test_cross_entropy_alone(weights, count, expected):
    tensors = row([1, 0, 1], [3], rl_weights=torch.zeros(3), ce_weights=double(weights))
    loss, gradient, metrics = run(tensors, TokenCounts(0, count, 0, 2), logprobs=[-0.1, -0.5, -0.2])
    assert loss == pytest.approx(expected, abs=1e-15)
    assert gradient == pytest.approx([-w / count for w in weights])
    assert metrics["nll"] == pytest.approx((0.3, 2))
    assert metrics["mismatch_kl"] == (0, 0)


def test_absent_rl_weights_are_ones():
    assert run(row(), TokenCounts(8, 0, 0, 2)) == run(row(rl_weights=torch.ones(10)), TokenCounts(8, 0, 0, 2))


def test_zero_rl_weight_leaves_the_loss_and_the_members():
    weights = torch.ones(10)
    weights[5:] = 0
    _, gradient, metrics = run(row(rl_weights=weights), TokenCounts(4, 0, 0, 2))
    assert gradient[5:] == [0] * 5
    assert metrics["is_masked"] == (1, 4)


def test_without_members_the_loss_is_zero_and_backward_still_runs():
    loss, gradient, metrics = run(row([0] * 10), TokenCounts(0, 0, 0, 2))
    assert loss == 0
    assert gradient == [0] * 10
    assert {count for _, count in metrics.values()} == {0}


def test_tokens_outside_the_mask_cannot_poison_the_gradient():
    logprobs, sampler = list(LOGPROBS), list(SAMPLER)
    logprobs[0], sampler[8] = float("-inf"), float("-inf")
    _, gradient, _ = run(row(logprobs=double(sampler)), TokenCounts(8, 0, 0, 2), logprobs=logprobs)
    assert gradient == pytest.approx(GRADIENT, abs=5e-9)


def test_metric_names_do_not_depend_on_the_data():
    weights = dict(ce_weights=torch.ones(10), ref_kl_weights=torch.ones(10), ref_logprobs=double(REFERENCE))
    assert run(row(), TokenCounts(8, 0, 0, 2))[2].keys() == run(row(**weights), TokenCounts(8, 10, 10, 2))[2].keys()


def test_entropy_is_averaged_over_the_mask():
    entropy = torch.arange(10.0)
    _, metrics = compute_loss(double(LOGPROBS), entropy, row(), DPPOLoss(), TokenCounts(8, 0, 0, 2), CURRENT)
    assert [v.item() for v in metrics["entropy"]] == [1 + 2 + 3 + 4 + 5 + 6 + 7 + 9, 8]


def sequence_mean_loss(inputs: LossInputs, scale: float) -> LossOutputs:
    """A loss at the level of sequences, as a user would write one."""
    chosen = torch.where(inputs.loss_mask, inputs.trainer_logprobs * inputs.advantages, 0.0)
    return LossOutputs(-scale * chosen.sum(), {"tokens": inputs.loss_mask.sum()})


def test_custom_loss_sees_every_sequence():
    config = CustomLoss(import_path=f"{__name__}.sequence_mean_loss", kwargs={"scale": 2.0})
    loss, gradient, metrics = run(row(), TokenCounts(8, 0, 0, 2), config)
    expected = [-2 * a * m / 8 for a, m in zip(ADVANTAGES, MASK, strict=True)]
    assert gradient == pytest.approx(expected)
    assert loss == pytest.approx(sum(g * x for g, x in zip(expected, LOGPROBS, strict=True)))
    assert metrics["tokens"] == (8, 2)


@pytest.mark.parametrize("path", ["loss", "no.such.module", f"{__name__}.no_such_loss"])
def test_custom_loss_that_cannot_be_imported_is_a_configuration_error(path):
    with pytest.raises(ConfigurationError, match="loss.import_path"):
        run(row(), TokenCounts(8, 0, 0, 2), CustomLoss(import_path=path))


def micro_batch() -> MicroBatch:
    return MicroBatch(
        token_ids=Array.of([5, 6, 7], "i4"),
        mask=Array.of([0, 1, 1], "bool"),
        logprobs=Array.of([0, -0.5, -0.25], "f4"),
        versions=Array.of([-1, CURRENT, CURRENT], "i8"),
        advantages=Array.of([0, 1, 1], "f4"),
        temperatures=Array.of([1, 1, 0.5], "f4"),
        seq_lens=[2, 1],
        sources=["a", "b"],
        rl_weights=Array.of([1, 0, 1], "f4"),
        ce_weights=Array.of([0.5, 0, 0], "f4"),
    )


def test_tensors_of_a_micro_batch():
    tensors = MicroBatchTensors.of(micro_batch(), "cpu")
    assert tensors.token_ids.dtype == tensors.versions.dtype == torch.int64
    assert tensors.position_ids.tolist() == [0, 1, 0]
    assert tensors.mask.tolist() == [False, True, True]
    assert tensors.logprobs.tolist() == [0, -0.5, -0.25]
    assert tensors.temperatures.tolist() == [1, 1, 0.5]
    assert tensors.rl_members.tolist() == [False, False, True]
    assert tensors.ce_members.tolist() == [True, False, False]
    assert tensors.ref_kl_weights is None and tensors.ref_logprobs is None
    assert (tensors.seq_lens, tensors.sources) == ([2, 1], ["a", "b"])


def test_counts_add_over_micro_batches_and_survive_a_tensor():
    plain = TokenCounts(2, 0, 0, 2)
    micro = micro_batch()
    counts = count_tokens([micro, micro])
    assert counts == TokenCounts(2, 2, 0, 2)
    micro.rl_weights = micro.ce_weights = None
    assert count_tokens([micro]) == plain
    assert TokenCounts.from_tensor(counts.tensor() + plain.tensor()) == TokenCounts(4, 2, 0, 4)


def test_sources_of_a_row_are_told_apart_where_that_is_asked_for():
    def array(values, dtype):
        return Array.of(values, dtype)

    zeros = array([0] * 5, "f4")
    versions = array([CURRENT] * 4 + [PolicyVersion(0, 3).pack()], "i8")
    micro = MicroBatch(token_ids=array([1] * 5, "i4"), mask=array([1, 1, 1, 0, 1], "bool"), logprobs=zeros,
                       versions=versions, advantages=array([1] * 5, "f4"), temperatures=array([1] * 5, "f4"),
                       seq_lens=[2, 2, 1], sources=["a", "b", "a"])  # fmt: skip
    logprobs = double([-0.1, -0.2, -0.5, -9.0, -0.4])

    def measured(**options):
        tensors = MicroBatchTensors.of(micro, "cpu", **options)
        return compute_loss(logprobs, -2 * logprobs, tensors, DPPOLoss(), TokenCounts(4, 0, 0, 3), CURRENT)[1]

    told = {name: (float(total), float(count)) for name, (total, count) in measured(by_source=True).items()}
    assert told["entropy/a"] == pytest.approx((1.4, 3)) and told["entropy/b"] == pytest.approx((1.0, 1))
    assert told["mismatch/abs_mean/a"] == pytest.approx((0.3, 2)) and told["mismatch/abs_mean/b"][1] == 1
    for name in ("entropy", "mismatch/abs_mean", "mismatch_kl", "is_masked"):
        sums = [sum(pair) for pair in zip(told[f"{name}/a"], told[f"{name}/b"], strict=True)]
        assert told[name] == pytest.approx(sums), name
    assert not [name for name in measured() if name.endswith(("/a", "/b"))]
