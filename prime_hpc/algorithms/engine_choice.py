"""Which engine a request goes to: that of its session while that is not overloaded, else the least busy one."""

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from typing import Protocol, TypeVar

SLACK = 0.25
"""An engine takes no request by affinity that brings it this share above the mean load."""


class Candidate(Protocol):
    """An engine that may be chosen; `load` counts what it is working on."""

    @property
    def name(self) -> str: ...

    @property
    def load(self) -> int: ...


E = TypeVar("E", bound=Candidate)


def choose(candidates: Sequence[E], session: str = "") -> E:
    """The engine for a request. Those of one `session` go to one engine, which has their prefix in its cache; without
    a session the least busy engine is taken, the first of several.

    Engines are ranked for a session by rendezvous hashing (Thaler and Ravishankar 1998), so that one that leaves or
    comes moves its own sessions only; each takes at most (1 + SLACK) of the mean load (consistent hashing with bounded
    loads, arXiv 1608.01350).
    """
    if not session:
        return min(candidates, key=lambda engine: engine.load)
    limit = ceil((1 + SLACK) * (sum(engine.load for engine in candidates) + 1) / len(candidates))
    ranked = sorted(candidates, key=lambda engine: _weight(session, engine.name), reverse=True)
    return next(engine for engine in ranked if engine.load < limit)


def _weight(session: str, engine: str) -> bytes:
    return blake2b(f"{session} {engine}".encode(), digest_size=8).digest()
