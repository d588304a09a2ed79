"""Configuration of the guard: limits on metrics, and what follows where they are passed."""

from dataclasses import dataclass
from typing import Literal

from prime_hpc.config.sections import FORBID_UNKNOWN, Positive


@dataclass(kw_only=True)
class Limit:
    """What a metric may be. A value that is not finite is past every limit; a row without the metric counts for
    nothing."""

    __pydantic_config__ = FORBID_UNKNOWN

    above: float | None = None
    """Values above this are past the limit."""
    below: float | None = None
    """Values below this are."""
    steps: Positive = 1
    """Values past the limit, in a row, after which the action follows."""
    action: Literal["warn", "pause", "stop"] = "warn"
    """warn: say so. pause: sample nothing new until `tune paused=false`. stop: save and leave."""


FINITE = {"optim/grad_norm": Limit()}
SAMPLED = {
    "mismatch/abs_mean": Limit(above=0.2, steps=3),
    "train/all/truncated": Limit(above=0.5, steps=3),
    "entropy": Limit(below=0.02, steps=10),
}


def limits(mode: str, given: dict[str, Limit | None]) -> dict[str, Limit]:
    """The limits of a run: those of its own before the usual ones, of which null removes one."""
    usual = FINITE | (SAMPLED if mode == "rl" else {})
    return {metric: limit for metric, limit in {**usual, **given}.items() if limit is not None}
