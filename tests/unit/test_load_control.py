"""What the orchestrator makes of the engines' gauges: where the limit begins, and which preemptions count."""

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from prime_hpc.config.run import RunConfig
from prime_hpc.orchestrator import load
from prime_hpc.orchestrator.concurrency import Throttle
from prime_hpc.orchestrator.gauges import Gauges
from prime_hpc.orchestrator.load import LoadControl
from prime_hpc.transport.messages import PolicyVersion

Told = dict[str, Gauges | None]


class Sampling:
    """Stands for the scheduler."""

    inflight, completed = 40, 0

    def __init__(self) -> None:
        self.throttle = Throttle(128, 8, 1000)

    @property
    def limit(self) -> int:
        return self.throttle.limit

    async def notify(self) -> None:
        pass


class Stage:
    """A run with two engines, whose gauges a test sets before every look."""

    def __init__(self, *, max_inflight: int | str = "auto", kv: str = "recompute"):
        self.config = RunConfig(seq_len=100)
        self.config.orchestrator.max_inflight, self.config.update.kv = max_inflight, kv
        self.versions = SimpleNamespace(served=PolicyVersion(0, 0), published=PolicyVersion(0, 0))
        self.scheduler, self.pool = Sampling(), SimpleNamespace(inflight=40)
        self.told: Told = {}
        engines = [SimpleNamespace(name=name, base_url=name, serving=True) for name in ("a", "b")]
        role = SimpleNamespace(config=self.config, log=logging.getLogger("test"))
        self.control = LoadControl(role, SimpleNamespace(engines=engines), self.pool, self.scheduler, self.versions)

    async def look(self, **told: Gauges | None) -> None:
        self.told = told
        await self.control._look()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    def make(**settings: str) -> Stage:
        made = Stage(**settings)

        async def told(http: object, base_url: str, timeout_s: float) -> Gauges | None:
            return made.told[base_url]

        monkeypatch.setattr(load, "read_gauges", told)
        return made

    return make


def gauges(preemptions: int = 0, kv_usage: float = 0.7) -> Gauges:
    return Gauges(kv_usage, running=20, waiting=0, preemptions=preemptions, kv_tokens=3000)


def test_it_begins_with_what_the_caches_hold_and_then_follows(stage: Callable[..., Stage]) -> None:
    async def scenario() -> None:
        made = stage()
        await made.look(a=gauges(), b=gauges(kv_usage=0.5))
        assert made.scheduler.limit == 2 * 3000 // 100
        await made.look(a=gauges(preemptions=2), b=gauges())
        assert made.scheduler.limit == 28
        assert made.control.take_metrics() == {
            "engines/kv_usage": 0.7, "engines/running": 40.0, "engines/waiting": 0.0, "engines/preempted": 2.0,
            "concurrency/grow": 0.0, "concurrency/trim": 0.0, "concurrency/cut": 1.0, "concurrency/limit": 28.0,
        }  # fmt: skip
        assert made.control.take_metrics() == {}

    asyncio.run(scenario())


def test_a_number_of_the_users_stands_and_the_load_is_told(stage: Callable[..., Stage]) -> None:
    async def scenario() -> None:
        made = stage(max_inflight=40)
        await made.look(a=gauges(), b=None)
        await made.look(a=gauges(preemptions=2), b=None)
        assert made.scheduler.limit == 128
        metrics = made.control.take_metrics()
        assert (metrics["engines/running"], metrics["engines/preempted"]) == (20.0, 2.0)
        assert not [name for name in metrics if name.startswith("concurrency/")]

    asyncio.run(scenario())


@pytest.mark.parametrize(("kv", "counted"), [("recompute", 0), ("drain", 0), ("keep", 1)])
def test_preemptions_of_an_update_do_not_count(stage: Callable[..., Stage], kv: str, counted: int) -> None:
    async def scenario() -> None:
        made = stage(kv=kv)
        await made.look(a=gauges(), b=gauges())
        made.versions.published = PolicyVersion(0, 1)
        await made.look(a=gauges(preemptions=20), b=gauges())
        during = made.control.take_metrics()["engines/preempted"]
        made.versions.served = PolicyVersion(0, 1)
        await made.look(a=gauges(preemptions=20), b=gauges(preemptions=20))
        after = made.control.take_metrics()["engines/preempted"]
        assert (during, after) == (20 * counted, 20 * counted)
        for _ in range(2):
            await made.look(a=gauges(preemptions=20), b=gauges(preemptions=20))
        await made.look(a=gauges(preemptions=21), b=gauges(preemptions=20))
        assert made.control.take_metrics()["engines/preempted"] == 1, "once the update is over they do"

    asyncio.run(scenario())


def test_what_evaluations_take_is_theirs(stage: Callable[..., Stage]) -> None:
    async def scenario() -> None:
        made = stage()
        made.pool.inflight = 60
        await made.look(a=gauges(kv_usage=0.95), b=gauges())
        assert made.scheduler.limit == round(0.7 / (0.95 / 60) - 20)

    asyncio.run(scenario())


def test_an_engine_that_started_again_begins_anew(stage: Callable[..., Stage]) -> None:
    async def scenario() -> None:
        made = stage()
        await made.look(a=gauges(preemptions=50), b=gauges())
        await made.look(a=None, b=gauges())
        await made.look(a=gauges(preemptions=7), b=gauges())
        await made.look(a=gauges(preemptions=5), b=gauges())
        assert made.control.take_metrics()["engines/preempted"] == 0

    asyncio.run(scenario())
