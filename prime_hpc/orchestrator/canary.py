"""The canary: engines must score a fixed sequence as the trainer does, or they hold other weights than were trained."""

import numpy as np

from prime_hpc.errors import InferenceFailure
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import Canary

SHOWN = 5

Checksums = list[dict[str, str]]
"""Of each parameter of each worker rank."""


def difference(scores: list[float], expected: Canary) -> float:
    """Mean absolute difference in nats a token; infinite where a score is not a number."""
    distance = float(np.abs(np.array(scores) - np.array(expected.logprobs)).mean())
    return distance if np.isfinite(distance) else float("inf")


def differing(one: Checksums, other: Checksums) -> list[str]:
    """Parameters that are not the same in both, in order; alike on all ranks or not."""
    return list(dict.fromkeys(name for mine, theirs in zip(one, other, strict=True)
                              for name, checksum in mine.items() if theirs.get(name) != checksum))  # fmt: skip


def wrong_weights(engine: str, version: PolicyVersion, distance: float, groups: list[str]) -> InferenceFailure:
    """Names what is wrong and what is done about it."""
    where = f"in {len(groups)} parameters, first {', '.join(groups[:SHOWN])}" if groups else "in unknown parameters"
    return InferenceFailure(f"{engine} scores the canary of v{version} {distance:.3g} nats a token off the trainer: "
                            f"its weights are wrong {where}; it is started again")  # fmt: skip
