"""How many rollouts run at once, by what the engines say of their KV caches and queues."""

from dataclasses import dataclass
from typing import Literal

TARGET = 0.7
"""Share of the fullest engine's KV cache that the limit aims at; lengths vary, and a full cache preempts."""
GROW_BELOW, TRIM_ABOVE, ALARM_ABOVE = 0.6, 0.8, 0.9
"""Uses of the cache below which the limit grows, above which it falls to what rollouts cost on average, and above which
to what they cost now. In between it rests."""
GROWTH = 1.25
"""Most that the limit grows while as many rollouts end as run."""
FADE = 0.95
"""What is left of an alarm's cost after as many rollouts ended as run."""
QUEUE_ABOVE, QUEUE_LEFT = 0.5, 0.1
"""Waiting requests, as a share of the running ones, that are too many, and that are left when they were."""
QUEUE_PATIENCE = 3
"""Looks in a row at a long queue before it counts: whole groups start at once."""

Decision = Literal["grow", "hold", "trim", "cut"]


@dataclass(frozen=True)
class Load:
    """The fleet at one look: KV use of the fullest engine; requests that run and wait; requests preempted since the
    look before; rollouts in flight, and ended without a failure since the look before; rollouts of evaluations in
    flight beside them, which no limit holds."""

    kv_usage: float
    running: int
    waiting: int
    preempted: int
    inflight: int
    completed: int
    beside: int = 0


class Throttle:
    """The limit of rollouts in flight.

    A rollout costs `kv_usage / (inflight + beside)` of a cache; the limit goes to where the mean cost fills `TARGET` of
    it, less what evaluations take meanwhile. There it settles from below and from above, since the cost does not depend
    on the limit. A preemption says that a cache is full, whatever the gauge showed; the cost at an alarm is remembered
    for some time. Growth is paid for by rollouts that end, so that those which are admitted show their cost before more
    follow; what is too much leaves by ending, and none is killed.
    """

    def __init__(self, start: int, group_size: int, ceiling: int):
        """The limit stays between one group and `ceiling`."""
        self._group_size, self._ceiling = group_size, max(ceiling, group_size)
        self._mean = self._alarm = 0.0
        self._queued = 0
        self.restart(start)

    @property
    def limit(self) -> int:
        return round(self._limit)

    def restart(self, limit: float) -> None:
        """Go on from `limit`."""
        self._limit = min(max(limit, self._group_size), self._ceiling)

    def observe(self, load: Load) -> Decision:
        """Move the limit by what a look at the fleet showed."""
        if not load.inflight:
            return "hold"
        usage = 1.0 if load.preempted else load.kv_usage
        turnover = min(load.completed / load.inflight, 1.0)
        binding = load.inflight + self._group_size > self.limit
        self._learn(usage / (load.inflight + load.beside), turnover, binding=binding, alarm=usage > ALARM_ABOVE)
        self._queued = self._queued + 1 if load.waiting > QUEUE_ABOVE * load.running else 0
        if usage > TRIM_ABOVE and self._lower(self._bearable - load.beside):
            return "cut" if load.preempted else "trim"
        if self._queued >= QUEUE_PATIENCE and self._lower(load.inflight - load.waiting + QUEUE_LEFT * load.running):
            return "trim"
        if binding and usage < GROW_BELOW and not load.waiting and self._raise(turnover, self._bearable - load.beside):
            return "grow"
        return "hold"

    def _lower(self, limit: float) -> bool:
        """Whether the limit changed."""
        before = self._limit
        self.restart(min(limit, before))
        return self._limit < before

    def _raise(self, turnover: float, bearable: float) -> bool:
        """Whether the limit changed."""
        before = self._limit
        self.restart(max(before, min(before * GROWTH**turnover, bearable)))
        return self._limit > before

    def _learn(self, cost: float, turnover: float, *, binding: bool, alarm: bool) -> None:
        """A few long rollouts at the end of a batch, below the limit, are not what others cost."""
        if binding:
            self._mean += (cost - self._mean) * (turnover if self._mean else 1.0)
        self._alarm *= FADE**turnover
        if alarm:
            self._alarm = max(self._alarm, cost)

    @property
    def _bearable(self) -> float:
        """Rollouts that fill `TARGET` of a cache."""
        cost = max(self._mean, self._alarm)
        return TARGET / cost if cost else float(self._ceiling)
