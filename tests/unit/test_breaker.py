"""When a source rests, for how long, and when that ends the run."""

import pytest

from prime_hpc.config.env import EnvConfig
from prime_hpc.errors import EnvironmentFailure
from prime_hpc.orchestrator.breaker import Breaker
from prime_hpc.transport.messages import Failure

RAISED = Failure(kind="environment", type="KeyError", message="answer")
LOST = Failure(kind="infrastructure", type="WorkerLost", message="gone")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(**settings: float) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker("words", EnvConfig(rest_s=10, **settings), clock), clock


def fail(breaker: Breaker, times: int) -> list[str | None]:
    return [breaker.account(RAISED) for _ in range(times)]


def test_a_source_rests_longer_each_time_until_an_episode_succeeds() -> None:
    breaker, clock = make(pause_max_s=1000)
    assert fail(breaker, 19) == [None] * 19 and breaker.resting_s == 0
    assert breaker.account(RAISED) == (
        "100% of the last 20 episodes of words failed, more than env.error_budget = 50%; the last one: KeyError: "
        "answer. words rests for 10 s"
    )
    assert breaker.resting_s == 10
    assert fail(breaker, 50) == [None] * 50, "what was still running says nothing new"
    clock.now = 10
    assert breaker.resting_s == 0
    assert fail(breaker, 1)[0].endswith("rests for 20 s")
    clock.now = 30
    assert breaker.account(None) is None
    assert fail(breaker, 3) == [None] * 3, "closed again: a few failures are not many"


def test_failures_that_are_not_the_environment_s_do_not_count() -> None:
    breaker, _ = make()
    assert [breaker.account(LOST) for _ in range(100)] == [None] * 100


def test_a_source_that_never_comes_back_ends_the_run() -> None:
    breaker, clock = make(pause_max_s=25)
    fail(breaker, 20)
    for now in (10, 20):
        clock.now = now
    clock.now = 30
    with pytest.raises(EnvironmentFailure, match="KeyError: answer"):
        fail(breaker, 8)
