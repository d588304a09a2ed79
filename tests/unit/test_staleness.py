"""Age of tokens, abandoned lineages, and which tokens one set of weights scores exactly."""

import pytest

from prime_hpc.algorithms.staleness import Lineages, max_age, restrict, single_version, token_staleness
from prime_hpc.plan.run_plan import Fork
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, PolicyVersion, Sample

FORKS = [Fork(lineage=1, step=10), Fork(lineage=2, step=6)]


def sample(versions: list[str | None], mask: list[int] | None = None, logprobs: list[float] | None = None) -> Sample:
    """A sample whose tokens carry `versions` ("lineage.step"); None is a token that was not sampled."""
    n = len(versions)
    packed = [NOT_SAMPLED if v is None else PolicyVersion.parse(v).pack() for v in versions]
    return Sample(
        sample_id="s0",
        source="a",
        token_ids=Array.of(range(n), "i4"),
        mask=Array.of([v is not None for v in versions] if mask is None else mask, "bool"),
        logprobs=Array.of([0] * n if logprobs is None else logprobs, "f4"),
        versions=Array.of(packed, "i8"),
    )


def mask(sample: Sample) -> list[int]:
    return sample.mask.numpy().astype(int).tolist()


@pytest.mark.parametrize(
    ("version", "alive"),
    [("0.6", True), ("0.7", False), ("0.10", False), ("1.6", True), ("1.10", False), ("2.6", True), ("2.99", True),
     ("3.0", False)],
)  # fmt: skip
def test_version_lives_if_no_later_fork_went_back_past_it(version, alive):
    assert Lineages(FORKS).alive(PolicyVersion.parse(version)) is alive


def test_current_lineage():
    assert Lineages([]).current == 0
    assert Lineages(FORKS).current == 2
    assert Lineages([]).alive(PolicyVersion(0, 1000))


def test_tokens_past_the_bound_leave_the_mask():
    before = sample([None, "0.1", "0.2", "0.3"])
    after, dropped = restrict(before, step=5, max_staleness=2, lineages=Lineages([]))
    assert mask(after) == [0, 0, 1, 1]
    assert dropped == {"stale": 1}
    assert mask(before) == [0, 1, 1, 1]
    assert after.versions == before.versions


def test_on_policy_bound_keeps_only_the_newest_version():
    after, dropped = restrict(sample(["0.3", "0.4"]), step=5, max_staleness=0, lineages=Lineages([]))
    assert (mask(after), dropped) == ([0, 1], {"stale": 1})


def test_every_reason_is_counted_once_for_each_token():
    before = sample([None, None, "0.1", "0.8", "0.8", "1.6", "2.7"], mask=[0, 1, 1, 1, 1, 1, 1])
    after, dropped = restrict(before, step=8, max_staleness=3, lineages=Lineages(FORKS))
    assert mask(after) == [0, 0, 0, 0, 0, 1, 1]
    assert dropped == {"unstamped": 1, "stale": 1, "lineage": 2}


def test_fresh_sample_is_returned_as_it_is():
    before = sample([None, "0.4"])
    after, dropped = restrict(before, step=5, max_staleness=0, lineages=Lineages([]))
    assert after is before
    assert dropped == {}


def test_staleness_is_judged_over_masked_tokens():
    it = sample([None, "0.1", "0.2", "0.4"], mask=[0, 0, 1, 1])
    assert token_staleness(it, 5).tolist() == [2, 0]
    assert max_age(it, 5) == 2
    assert max_age(sample([None, None]), 5) == 0


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([None, "0.1", "0.1", None, "0.1"], [0, 1, 1, 0, 1]),
        ([None, "0.1", "0.2", "0.2"], [0, 1, 0, 0]),
        ([None, "0.1", "0.2", "0.1"], [0, 1, 0, 0]),
        ([None, None], [0, 0]),
    ],
)
def test_single_version(versions, expected):
    assert single_version(sample(versions)).tolist() == expected


def test_token_outside_the_mask_is_context():
    assert single_version(sample(["0.1", "0.2"], mask=[0, 1])).tolist() == [True, False]


def test_token_that_lost_its_stamp_is_context_even_after_it_left_the_mask():
    before = sample(["0.1", None, "0.1"], mask=[1, 1, 1], logprobs=[-0.5, -0.5, -0.5])
    after, _ = restrict(before, step=2, max_staleness=0, lineages=Lineages([]))
    assert single_version(before).tolist() == single_version(after).tolist() == [True, False, False]
