"""Configuration of task order: which task of a source comes next (docs/algorithms.md)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from prime_hpc.config.sections import FORBID_UNKNOWN


@dataclass(kw_only=True)
class Sequential:
    """In the taskset's order, over and over."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Literal["sequential"] = "sequential"
    """The order."""


@dataclass(kw_only=True)
class Shuffled:
    """Every task once an epoch, in a new order each time."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Literal["shuffled"] = "shuffled"
    """The order."""


@dataclass(kw_only=True)
class Pool:
    """Tasks of like difficulty."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: str
    """Name in metrics."""
    threshold: float
    """Greatest mean reward of the task's latest group."""
    weight: Annotated[float, Field(ge=0)]
    """How often a task of this pool is drawn, beside 1 for a task that was never seen."""


def _default_pools() -> list[Pool]:
    return [Pool(name="hard", threshold=0.25, weight=0.2), Pool(name="normal", threshold=0.75, weight=1.0),
            Pool(name="easy", threshold=1.0, weight=0.2)]  # fmt: skip


@dataclass(kw_only=True)
class DifficultyPools:
    """At random, weighted by how hard the task was last time."""

    __pydantic_config__ = FORBID_UNKNOWN

    name: Literal["difficulty_pools"] = "difficulty_pools"
    """The order."""
    pools: Annotated[list[Pool], Field(min_length=1)] = field(default_factory=_default_pools)
    """A task belongs to the first pool, by threshold, that its mean reward does not exceed, else to the last."""


TaskSampling = Annotated[Sequential | Shuffled | DifficultyPools, Field(discriminator="name")]
