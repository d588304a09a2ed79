"""The limit of rollouts in flight on a simulated engine: where it settles, how it answers, and that it stays there."""

import random
from dataclasses import dataclass, field

import pytest

from prime_hpc.orchestrator.concurrency import GROWTH, TARGET, Decision, Load, Throttle

GROUP = 4
STEP_TOKENS = 8
"""Tokens that every running request samples between two looks."""


@dataclass
class Request:
    length: int
    sampled: int = 0


@dataclass
class Engine:
    """A KV cache of `capacity` tokens and `places` in a decoding batch; the newest request is preempted where the cache
    is full, and starts again from its prompt and reply once there is room."""

    capacity: int
    places: int
    rng: random.Random
    lengths: tuple[int, int]
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(request.sampled for request in self.running)

    @property
    def inflight(self) -> int:
        return len(self.running) + len(self.waiting)

    def admit(self, count: int) -> None:
        self.waiting += [Request(self.rng.randint(*self.lengths)) for _ in range(count)]
        self._fill()

    def step(self) -> tuple[int, int]:
        """Requests that were preempted and that ended."""
        preempted = 0
        while self.used + STEP_TOKENS * len(self.running) > self.capacity:
            self.waiting.insert(0, self.running.pop())
            preempted += 1
        for request in self.running:
            request.sampled += STEP_TOKENS
        ended = [request for request in self.running if request.sampled >= request.length]
        self.running = [request for request in self.running if request.sampled < request.length]
        self._fill()
        return preempted, len(ended)

    def _fill(self) -> None:
        room = self.capacity - self.used - STEP_TOKENS * len(self.running)
        while self.waiting and len(self.running) < self.places:
            room -= self.waiting[0].sampled + STEP_TOKENS
            if room < 0:
                break
            self.running.append(self.waiting.pop(0))


def simulate(throttle: Throttle, engine: Engine, looks: int) -> list[tuple[Decision, int, int]]:
    """(decision, limit after it, preempted before it) of every look."""
    history = []
    for _ in range(looks):
        while engine.inflight + GROUP <= throttle.limit:
            engine.admit(GROUP)
        preempted, ended = engine.step()
        load = Load(engine.used / engine.capacity, len(engine.running), len(engine.waiting), preempted,
                    engine.inflight, ended)  # fmt: skip
        history.append((throttle.observe(load), throttle.limit, preempted))
    return history


def make_engine(*, capacity: int = 12_000, places: int = 10_000, lengths: tuple[int, int] = (150, 250)) -> Engine:
    return Engine(capacity, places, random.Random(0), lengths)


SETTLED = TARGET * 12_000 / 100
"""Requests whose mean cost, half of a reply, fills the target of the cache."""


@pytest.mark.parametrize("start", [GROUP, 40, 400])
def test_it_settles_at_one_place_from_below_and_above_and_stays(start: int) -> None:
    throttle, engine = Throttle(start, GROUP, 1000), make_engine()
    history = simulate(throttle, engine, 1000)
    late = history[600:]
    limits = {limit for _, limit, _ in late}
    assert 0.7 * SETTLED < min(limits) and max(limits) < 1.1 * SETTLED
    assert not any(preempted for _, _, preempted in late)
    moves = [decision for decision, _, _ in late if decision != "hold"]
    assert "cut" not in moves and moves.count("trim") <= 1 and max(limits) - min(limits) <= 0.1 * max(limits)


def test_it_grows_no_faster_than_rollouts_end() -> None:
    throttle = Throttle(40, GROUP, 400)
    assert throttle.observe(Load(0.1, 40, 0, 0, 40, 0)) == "hold"
    assert throttle.observe(Load(0.1, 40, 0, 0, 40, 20)) == "grow"
    assert throttle.limit == round(40 * GROWTH**0.5)
    assert throttle.observe(Load(0.1, 44, 0, 0, 44, 400)) == "grow"
    assert throttle.limit == round(40 * GROWTH**1.5)


def test_a_preemption_counts_at_once_and_once() -> None:
    throttle = Throttle(100, GROUP, 400)
    assert throttle.observe(Load(0.5, 90, 10, 1, 100, 1)) == "cut"
    assert throttle.limit == round(TARGET * 100)
    assert throttle.observe(Load(1.0, 90, 10, 3, 100, 0)) == "hold", "the same rollouts are still there"
    assert throttle.observe(Load(0.9, 80, 0, 0, 90, 10)) == "hold", "they leave by ending"
    assert throttle.limit == round(TARGET * 100)
    for _ in range(10):
        throttle.observe(Load(0.4, throttle.limit, 0, 0, throttle.limit, 7))
    assert throttle.limit < 1.1 * TARGET * 100, "and what it cost is remembered"


def test_evaluations_lower_the_limit_while_they_run_and_not_what_rollouts_seem_to_cost() -> None:
    throttle = Throttle(60, GROUP, 400)
    assert throttle.observe(Load(0.9, 90, 0, 0, 60, 0, beside=30)) == "trim"
    assert throttle.limit == round(TARGET * 100) - 30
    for _ in range(10):
        throttle.observe(Load(0.4, throttle.limit, 0, 0, throttle.limit, throttle.limit))
    assert throttle.limit > 60


def test_longer_rollouts_lower_the_limit_and_shorter_ones_raise_it_again() -> None:
    throttle, engine = Throttle(100, GROUP, 400), make_engine()
    simulate(throttle, engine, 500)
    short = throttle.limit
    engine.lengths = (600, 1000)
    simulate(throttle, engine, 1500)
    long = throttle.limit
    assert 0.15 < long / short < 0.35, "four times as long"
    engine.lengths = (150, 250)
    history = simulate(throttle, engine, 3000)
    assert history[-1][1] > 0.75 * short
    assert not any(preempted for _, _, preempted in history)


def test_a_queue_for_places_is_kept_short() -> None:
    throttle, engine = Throttle(400, GROUP, 400), make_engine(places=20)
    history = simulate(throttle, engine, 600)
    assert {decision for decision, _, _ in history[300:]} <= {"hold", "grow"}
    assert 20 <= min(limit for _, limit, _ in history[300:])
    assert history[-1][1] == 20 + GROUP, "one group waits, and the limit rests"


def test_bounds_hold() -> None:
    throttle = Throttle(1, GROUP, 16)
    assert throttle.limit == GROUP
    for _ in range(50):
        throttle.observe(Load(0.0, throttle.limit, 0, 0, throttle.limit, throttle.limit))
    assert throttle.limit == 16
    for inflight in (16, 8, 4):
        throttle.observe(Load(1.0, inflight, 0, 9, inflight, 0))
    assert throttle.limit == GROUP
    assert Throttle(100, 8, 4).limit == 8


def test_a_few_long_rollouts_at_the_end_of_a_batch_say_nothing() -> None:
    throttle = Throttle(100, GROUP, 400)
    throttle.observe(Load(0.5, 100, 0, 0, 100, 10))
    before = throttle.limit
    for _ in range(20):
        assert throttle.observe(Load(0.3, 10, 0, 0, 10, 0)) == "hold"
    assert throttle.observe(Load(0.5, before, 0, 0, before, 50)) == "grow"
