"""Which loss components the tokens of a sample join."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Sample

Component = Literal["rl", "ce", "ref_kl"]


def route(sample: Sample, component: Component) -> Sample:
    """`sample` with its masked tokens in `component` alone; weights that other tokens already carry stay.

    rl is what absent weights mean, so that the common case adds nothing to the message. ce on the policy's tokens is
    distillation from whoever sampled them.

    Raises:
        ValueError: unknown component, or ref_kl for a sample that no reference has scored.
    """
    if component == "rl":
        return sample
    if component == "ce":
        return msgspec.structs.replace(sample, rl_weights=_zeros(sample), ce_weights=_joined(sample, sample.ce_weights))
    if component == "ref_kl":
        if sample.ref_logprobs is None:
            raise ValueError(f"{sample.sample_id} was not scored under a reference")
        weights = _joined(sample, sample.ref_kl_weights)
        return msgspec.structs.replace(sample, rl_weights=_zeros(sample), ref_kl_weights=weights)
    raise ValueError(f"unknown loss component {component!r}: expected rl, ce or ref_kl")


@dataclass(frozen=True)
class Span:
    """The tokens of one message of a conversation. `body`, where known, is false on the template around the text."""

    role: str
    length: int
    sampled: bool = False
    body: Sequence[bool] | None = None


def echo_weights(spans: Sequence[Span], alphas: Mapping[str, float]) -> np.ndarray | None:
    """f4[n]: cross-entropy weight of what the environment said after the policy's first reply, by role of the message;
    None where no token has one. So the policy learns to foresee what its actions bring about."""
    streams, replied = [], False
    for span in spans:
        alpha = 0.0 if span.sampled or not replied else alphas.get(span.role, 0.0)
        body = np.ones(span.length) if span.body is None else np.asarray(span.body)
        streams.append(alpha * body)
        replied |= span.sampled
    weights = np.concatenate(streams).astype(np.float32) if streams else np.zeros(0, dtype=np.float32)
    return weights if weights.any() else None


def _zeros(sample: Sample) -> Array:
    return Array.of(np.zeros(len(sample.mask), dtype=np.float32), "f4")


def _joined(sample: Sample, weights: Array | None) -> Array:
    before = np.zeros(len(sample.mask), dtype=np.float32) if weights is None else weights.numpy()
    return Array.of(np.where(sample.mask.numpy(), np.float32(1), before), "f4")
