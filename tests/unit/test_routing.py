"""Routing of tokens to loss components: sampled ones, a teacher's, and what the environment said."""

import msgspec
import pytest

from prime_hpc.algorithms.routing import Span, echo_weights, route
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
        ref_logprobs=Array.of([0] * 6, "f4"),
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


def test_what_no_reference_has_scored_is_refused():
    with pytest.raises(ValueError, match="was not scored under a reference"):
        route(msgspec.structs.replace(sample(), ref_logprobs=None), "ref_kl")


def spans(role: str, body: list[bool] | None = None) -> list[Span]:
    """Two tokens each: a question, a reply, what the environment says to it, a second reply."""
    return [Span("user", 2), Span("assistant", 2, sampled=True), Span(role, 2, body=body),
            Span("assistant", 2, sampled=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("conversation", "alphas", "expected"),
    [
        (spans("tool"), {"tool": 0.5}, [0, 0, 0, 0, 0.5, 0.5, 0, 0]),
        (spans("user"), {"user": 0.25}, [0, 0, 0, 0, 0.25, 0.25, 0, 0]),
        (spans("user"), {"tool": 0.5}, None),
        (spans("tool", body=[False, True]), {"tool": 0.5}, [0, 0, 0, 0, 0, 0.5, 0, 0]),
        (spans("tool")[:2], {"tool": 0.5, "user": 0.5, "assistant": 0.5}, None),
        ([], {"tool": 0.5}, None),
    ],
)
def test_echo_weighs_what_the_environment_said_after_a_reply(conversation, alphas, expected):
    found = echo_weights(conversation, alphas)
    assert (None if found is None else found.tolist()) == expected
