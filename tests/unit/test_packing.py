"""Packing: equal micro-batch counts, nothing lost, balanced work, streams on the right tokens."""

from functools import partial

import numpy as np
import pytest

from prime_hpc.algorithms.packing import arrange, pack
from prime_hpc.models.spec import train_flops
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, MicroBatch, PolicyVersion, Sample
from tools.bench_packing import SHAPE, lognormal_lengths, measure


def sample(n: int, name: str = "s", advantage: float | None = 1.0, temperature: float = 1.0, **streams) -> Sample:
    """One prompt token and n - 1 sampled ones; token ids count up from 0."""
    return Sample(
        sample_id=name,
        source=name,
        token_ids=Array.of(range(n), "i4"),
        mask=Array.of(np.arange(n) > 0, "bool"),
        logprobs=Array.of(np.arange(n) / -8, "f4"),
        versions=Array.of([NOT_SAMPLED] + [0] * (n - 1), "i8"),
        temperature=temperature,
        advantages=None if advantage is None else Array.of([advantage] * n, "f4"),
        **{key: Array.of(values, "f4") for key, values in streams.items()},
    )


def tokens(row: list[int]) -> float:
    return float(sum(row))


def flops(row: list[int]) -> float:
    return sum(n + n * n / 8 for n in row)


def trains(micro: MicroBatch) -> bool:
    return bool(micro.mask.numpy().any())


def of_lengths(lengths: list[int], ranks: int, max_tokens: int, cost) -> list[list[list[int]]]:
    """Lengths by rank and row."""
    return [[[lengths[i] for i in row] for row in rows] for rows in arrange(lengths, ranks, max_tokens, cost)]


@pytest.mark.parametrize(
    ("count", "ranks", "each", "dummies"), [(4, 2, 2, 0), (5, 2, 3, 1), (7, 1, 7, 0), (11, 4, 3, 1)]
)
def test_every_rank_gets_as_many(count, ranks, each, dummies):
    packed = pack([sample(4) for _ in range(count)], ranks, max_tokens=4)
    assert [len(rows) for rows in packed] == [each] * ranks
    idle = [micro for rows in packed for micro in rows if not trains(micro)]
    assert len(idle) == dummies
    for micro in idle:
        assert not micro.advantages.numpy().any()
        assert (micro.rl_weights, micro.ce_weights, micro.ref_kl_weights) == (None, None, None)


@pytest.mark.parametrize("case", range(40))
def test_nothing_is_lost(case):
    rng = np.random.default_rng(case)
    ranks, max_tokens = int(rng.integers(1, 9)), int(rng.integers(16, 200))
    lengths = rng.integers(2, max_tokens + 1, size=int(rng.integers(1, 60))).tolist()
    packed = pack([sample(n) for n in lengths], ranks, max_tokens, flops if case % 2 else None)
    assert len({len(rows) for rows in packed}) == 1
    micros = [micro for rows in packed for micro in rows]
    assert sorted(n for micro in micros if trains(micro) for n in micro.seq_lens) == sorted(lengths)
    for micro in micros:
        n = sum(micro.seq_lens)
        assert n <= max_tokens
        assert {len(s) for s in (micro.token_ids, micro.mask, micro.logprobs, micro.versions, micro.advantages,
                                 micro.temperatures)} == {n}  # fmt: skip
        assert len(micro.sources) == len(micro.seq_lens)
        assert micro.token_ids.numpy().tolist() == micro.position_ids().tolist()


def test_rows_are_split_before_dummies_are_made():
    packed = pack([sample(n) for n in (6, 6, 5, 5, 4, 4)], 4, max_tokens=12)
    assert [len(rows) for rows in packed] == [1] * 4
    assert all(trains(rows[0]) for rows in packed)


def test_split_halves_the_costliest_rows():
    lengths = [20, 18, 9, 9, 8, 8, 8]
    rows = [row for rank in of_lengths(lengths, 4, 64, tokens) for row in rank]
    assert rows == [[20, 9], [18], [9, 8], [8, 8]]


def test_ranks_get_the_same_tokens():
    rows = of_lengths([100, 90, 80, 70], 2, 100, tokens)
    assert [sum(map(sum, rank)) for rank in rows] == [170, 170]


def test_ranks_get_the_same_work_in_the_same_order():
    rows = of_lengths([32, 32, 16, 16, 16, 16], 2, 32, flops)
    assert rows == [[[32], [16, 16]], [[32], [16, 16]]]


@pytest.mark.parametrize("ranks", [4, 16])
def test_work_is_balanced(ranks):
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1, size=1000).clip(8, 4096).astype(int).tolist()
    loads = [sum(map(flops, rank)) for rank in of_lengths(lengths, ranks, 4096, flops)]
    assert max(loads) / (sum(loads) / ranks) < 1.01


def test_rows_are_full_and_work_is_even():
    lengths = lognormal_lengths(4096, 32768)
    cost = partial(train_flops, SHAPE)
    found = measure(lengths, 8, 32768, cost)
    assert found["fill"] == found["bound"] > 0.98, "as few rows as any packing can have"
    assert found["balance"] < 1.01


def test_the_same_lengths_pack_alike():
    lengths = np.random.default_rng(0).integers(16, 2048, size=2000).tolist()
    assert arrange(lengths, 64, 2048, flops) == arrange(lengths, 64, 2048, flops)


def test_long_samples_are_cut():
    [[micro]] = pack([sample(10, rl_weights=[1] * 10)], 1, max_tokens=6)
    assert micro.seq_lens == [6]
    assert micro.token_ids.numpy().tolist() == [0, 1, 2, 3, 4, 5]
    assert len(micro.rl_weights) == 6


def test_streams_that_some_samples_lack_are_filled():
    whole = sample(3, "long", rl_weights=[0, 0.5, 0.5], ce_weights=[1, 0, 0], ref_kl_weights=[0, 1, 1],
                   ref_logprobs=[0, -1, -2], temperature=0.5)  # fmt: skip
    [[micro]] = pack([sample(2, "short"), whole], 1, max_tokens=8)
    assert micro.sources == ["long", "short"]
    assert micro.seq_lens == [3, 2]
    assert micro.rl_weights.numpy().tolist() == [0, 0.5, 0.5, 1, 1]
    assert micro.ce_weights.numpy().tolist() == [1, 0, 0, 0, 0]
    assert micro.ref_kl_weights.numpy().tolist() == [0, 1, 1, 0, 0]
    assert micro.ref_logprobs.numpy().tolist() == [0, -1, -2, 0, 0]
    assert micro.temperatures.numpy().tolist() == [0.5, 0.5, 0.5, 1, 1]
    assert micro.mask.numpy().tolist() == [False, True, True, False, True]
    assert micro.logprobs.numpy().tolist() == [0, -0.125, -0.25, 0, -0.125]


def test_streams_that_no_sample_has_stay_away():
    [[micro]] = pack([sample(2), sample(3)], 1, max_tokens=8)
    assert (micro.rl_weights, micro.ce_weights, micro.ref_kl_weights, micro.ref_logprobs) == (None,) * 4


def test_versions_keep_only_tokens_that_one_set_of_weights_scores():
    mixed = sample(4)
    one, two = PolicyVersion(0, 1).pack(), PolicyVersion(0, 2).pack()
    mixed.versions = Array.of([NOT_SAMPLED, one, two, two], "i8")
    [[micro]] = pack([mixed], 1, max_tokens=4)
    assert micro.versions.numpy().tolist() == [NOT_SAMPLED, one, NOT_SAMPLED, NOT_SAMPLED]


def test_rl_token_without_advantage_is_refused():
    with pytest.raises(ValueError, match="s7 has tokens of the rl component and no advantages"):
        pack([sample(3, "s7", advantage=None)], 1, max_tokens=4)
    [[micro]] = pack([sample(3, advantage=None, rl_weights=[0] * 3, ce_weights=[0, 1, 1])], 1, max_tokens=4)
    assert micro.advantages.numpy().tolist() == [0, 0, 0]


def test_batch_without_samples_is_refused():
    with pytest.raises(ValueError, match="without samples"):
        pack([], 2, max_tokens=4)
