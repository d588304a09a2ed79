"""Packing: equal micro-batch counts, nothing lost, balanced work, streams on the right tokens."""

from functools import partial

import msgspec
import numpy as np
import pytest

from prime_hpc.algorithms.packing import arrange, pack
from prime_hpc.algorithms.tenants import split_by_adapter
from prime_hpc.models.spec import train_flops
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, ImageSpan, MicroBatch, PolicyVersion, RoutedExperts, Sample
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


def test_experts_follow_their_tokens_and_are_negative_where_there_is_no_record():
    experts = np.arange(12).reshape(3, 2, 2)
    recorded = msgspec.structs.replace(sample(3, "a"), routed_experts=RoutedExperts.of(experts))
    [[micro]] = pack([recorded, sample(2, "b")], 1, 8)
    assert micro.sources == ["a", "b"]
    assert micro.routed_experts.numpy().tolist() == [*experts.tolist(), *np.full((2, 2, 2), -1).tolist()]
    [[cut]] = pack([recorded], 1, 2)
    assert cut.routed_experts.numpy().tolist() == experts[:2].tolist()
    assert pack([sample(2)], 1, 8)[0][0].routed_experts is None


def shown(n: int, name: str, *images: tuple[int, int]) -> Sample:
    """A sample with images of these starts and lengths, named after it."""
    spans = [ImageSpan(start, length, f"{name}{i}") for i, (start, length) in enumerate(images)]
    return msgspec.structs.replace(sample(n, name), images=spans)


def test_images_follow_their_tokens_among_text():
    [[micro]] = pack([sample(6, "text"), shown(5, "b", (1, 2)), shown(9, "a", (1, 3), (5, 2))], 1, 32)
    starts = dict(zip(micro.sources, np.cumsum([0, *micro.seq_lens]).tolist(), strict=False))
    assert {image.digest: image.start for image in micro.images} == {
        "a0": starts["a"] + 1, "a1": starts["a"] + 5, "b0": starts["b"] + 1,
    }  # fmt: skip
    assert [image.start for image in micro.images] == sorted(image.start for image in micro.images)
    assert [micro.token_ids.numpy()[image.start] for image in micro.images if image.digest == "a1"] == [5]
    assert split_by_adapter(micro)[0].micro is micro


@pytest.mark.parametrize(("max_tokens", "length", "images"), [(9, 9, 2), (8, 8, 2), (7, 5, 1), (5, 5, 1), (4, 2, 0)])
def test_a_row_that_is_cut_splits_no_image(max_tokens, length, images):
    [[micro]] = pack([shown(9, "a", (2, 3), (5, 3))], 1, max_tokens)
    assert (micro.seq_lens, len(micro.images)) == ([length], images)
    assert {len(micro.token_ids), len(micro.mask), len(micro.advantages), len(micro.versions)} == {length}


def test_a_dummy_shows_nothing():
    [[real], [dummy]] = pack([shown(5, "a", (1, 2))], 2, 8)
    assert len(real.images) == 1 and not trains(dummy) and dummy.images == []


def of_adapter(n: int, adapter: str) -> Sample:
    return msgspec.structs.replace(sample(n, f"{adapter}{n}"), adapter=adapter)


def test_sequences_of_an_adapter_lie_together_and_can_be_taken_apart():
    [[micro]] = pack([of_adapter(4, "b"), of_adapter(3, "a"), of_adapter(2, "b")], 1, 16)
    assert (micro.adapters, micro.seq_lens) == (["a", "b", "b"], [3, 4, 2])
    a, b = split_by_adapter(micro)
    assert (a.adapter, a.tokens, b.adapter, b.tokens) == ("a", slice(0, 3), "b", slice(3, 9))
    assert (b.micro.seq_lens, b.micro.sources, b.micro.adapters) == ([4, 2], ["b4", "b2"], ["b", "b"])
    assert b.micro.token_ids.numpy().tolist() == [0, 1, 2, 3, 0, 1]
    assert a.micro.position_ids().tolist() == [0, 1, 2]


def test_a_row_of_one_policy_stays_whole():
    [[micro]] = pack([sample(4), sample(3)], 1, 16)
    [part] = split_by_adapter(micro)
    assert micro.adapters == [] and part.micro is micro and (part.adapter, part.tokens) == ("", slice(0, 7))
