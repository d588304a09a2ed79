"""Which loss component the sampled tokens of a sample join."""

from typing import Literal

import msgspec
import numpy as np

from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Sample

Component = Literal["rl", "ce", "ref_kl"]


def route(sample: Sample, component: Component) -> Sample:
    """`sample` with its masked tokens in `component` alone; weights that other tokens already carry stay.

    rl is what absent weights mean, so that the common case adds nothing to the message.

    Raises:
        ValueError: unknown component.
    """
    if component == "rl":
        return sample
    if component == "ce":
        return msgspec.structs.replace(sample, rl_weights=_zeros(sample), ce_weights=_joined(sample, sample.ce_weights))
    if component == "ref_kl":
        weights = _joined(sample, sample.ref_kl_weights)
        return msgspec.structs.replace(sample, rl_weights=_zeros(sample), ref_kl_weights=weights)
    raise ValueError(f"unknown loss component {component!r}: expected rl, ce or ref_kl")


def _zeros(sample: Sample) -> Array:
    return Array.of(np.zeros(len(sample.mask), dtype=np.float32), "f4")


def _joined(sample: Sample, weights: Array | None) -> Array:
    before = np.zeros(len(sample.mask), dtype=np.float32) if weights is None else weights.numpy()
    return Array.of(np.where(sample.mask.numpy(), np.float32(1), before), "f4")
