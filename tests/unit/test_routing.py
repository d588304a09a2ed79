"""Routing of sampled tokens to a loss component."""

import msgspec
import pytest

from prime_hpc.algorithms.routing import route
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Sample

MASK = [0, 0, 1, 1, 0, 1]
ECHO = [0, 0, 0, 0, 0.5, 0]


def sample(**streams: list[float]) -> Sample:
    return Sample(
        sample_id="s0",
        source="a",
        token_ids=Array.of(range(6), "i4"),
        mask=Array.of(MASK, "bool"),
        logprobs=Array.of([0] * 6, "f4"),
        versions=Array.of([0] * 6, "i8"),
        **{name: Array.of(values, "f4") for name, values in streams.items()},
    )


def weights(sample: Sample) -> list[list[float] | None]:
    streams = (sample.rl_weights, sample.ce_weights, sample.ref_kl_weights)
    return [None if stream is None else stream.numpy().tolist() for stream in streams]


@pytest.mark.parametrize(
    ("component", "before", "expected"),
    [
        ("rl", {}, [None, None, None]),
        ("rl", {"ce_weights": ECHO}, [None, ECHO, None]),
        ("ce", {}, [[0] * 6, MASK, None]),
        ("ce", {"ce_weights": ECHO}, [[0] * 6, [0, 0, 1, 1, 0.5, 1], None]),
        ("ref_kl", {}, [[0] * 6, None, MASK]),
        ("ref_kl", {"ce_weights": ECHO}, [[0] * 6, ECHO, MASK]),
    ],
)
def test_weights(component, before, expected):
    assert weights(route(sample(**before), component)) == expected


def test_rl_changes_nothing():
    before = sample()
    assert msgspec.msgpack.encode(route(before, "rl")) == msgspec.msgpack.encode(before)


def test_unknown_component_is_refused():
    with pytest.raises(ValueError, match="expected rl, ce or ref_kl"):
        route(sample(), "kl")
