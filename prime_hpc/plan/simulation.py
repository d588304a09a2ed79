"""A run as a discrete-event simulation: rollouts, batches and training steps by their measured durations."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

WARM_UP = 0.2
"""Share of the steps that are left out of the means: queues fill."""


@dataclass(frozen=True)
class Timings:
    """Seconds, as measured: of the rollouts of each group, which are alike since their task is the same; of steps, the
    part that more ranks share and the rest (publishing, saving); of the engines' pause for an update."""

    groups: list[list[float]]
    compute: list[float]
    fixed: list[float]
    pause: float


@dataclass(frozen=True)
class Setting:
    """What may be changed; `ranks` is the number of trainer ranks over that of the measured run, `group_size` the mean
    where sources differ."""

    batch_size: int
    group_size: int
    max_inflight: int
    max_staleness: int
    max_lead: int = 1
    ranks: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """Mean seconds of a step; share of the time that the trainer waited, and that no rollout ran."""

    step_s: float
    trainer_idle: float
    engines_idle: float


def simulate(setting: Setting, timings: Timings, steps: int = 200, seed: int = 0) -> Outcome:
    """Run `steps` steps with durations drawn anew from the measured ones.

    Groups are opened and batches cut by the orchestrator's rules; every rollout takes as long as at the measured load.
    """
    return _Run(setting, timings, np.random.default_rng(seed)).go(steps)


class _Run:
    """The state of a simulated run. Events are (when, number, what happens then)."""

    def __init__(self, setting: Setting, timings: Timings, rng: np.random.Generator):
        self.setting, self.timings, self.rng = setting, timings, rng
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbered = self.running = self.opened = self.ready = self.shipped = self.trained = 0
        self.training = False
        self.ends: list[float] = []
        self.waited = self.empty = 0.0

    def go(self, steps: int) -> Outcome:
        self._look()
        while self.trained < steps:
            when, _, happen = heapq.heappop(self.events)
            self.waited += 0.0 if self.training else when - self.now
            self.empty += 0.0 if self.running else when - self.now
            self.now = when
            happen()
            self._look()
        ends = self.ends[int(WARM_UP * steps) :]
        return Outcome((ends[-1] - ends[0]) / (len(ends) - 1), self.waited / self.now, self.empty / self.now)

    def _look(self) -> None:
        """Cut a batch, start to train it and open groups, wherever there is room."""
        size = self.setting.batch_size
        if self.ready >= size and self.shipped - self.trained < self.setting.max_lead:
            self.ready -= size
            self.opened -= size
            self.shipped += 1
        if self.shipped > self.trained and not self.training:
            self.training = True
            compute, fixed = self.rng.choice(self.timings.compute), self.rng.choice(self.timings.fixed)
            self._after(compute / self.setting.ranks + fixed, self._step_done)
        while self._may_open():
            self._open()

    def _may_open(self) -> bool:
        setting, lead = self.setting, self.shipped - self.trained
        fresh = (setting.max_staleness + 1 - lead) * setting.batch_size
        return (
            self.ready < setting.batch_size
            and self.running + setting.group_size <= max(setting.max_inflight, setting.group_size)
            and self.opened < fresh
        )

    def _open(self) -> None:
        left = self.setting.group_size
        self.running += left
        self.opened += left

        def finished() -> None:
            nonlocal left
            left -= 1
            self.running -= 1
            if left == 0:
                self.ready += self.setting.group_size

        group = self.timings.groups[self.rng.integers(len(self.timings.groups))]
        for seconds in self.rng.choice(group, left, replace=len(group) < left):
            self._after(seconds, finished)

    def _step_done(self) -> None:
        """Rollouts that run are held up while engines take the new weights."""
        self.training = False
        self.trained += 1
        self.ends.append(self.now)
        self.events = [(when + self.timings.pause, number, happen) for when, number, happen in self.events]

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.numbered += 1
        heapq.heappush(self.events, (self.now + seconds, self.numbered, happen))
