import asyncio
import threading

import pytest

from prime_hpc.envs import failures
from prime_hpc.envs.failures import Timeout, failure_of_exception, limited
from prime_hpc.envs.watchdog import Watchdog
from prime_hpc.errors import CorruptData, InferenceFailure


def test_an_episode_within_its_limit_is_returned() -> None:
    async def episode() -> str:
        return "done"

    assert asyncio.run(limited(episode(), 10.0)) == "done"


def test_an_episode_past_its_limit_is_cancelled() -> None:
    cleaned = []

    async def episode() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(True)

    with pytest.raises(Timeout, match="not over after 0.05 s"):
        asyncio.run(limited(episode(), 0.05))
    assert cleaned == [True]


def test_an_episode_that_shrugs_off_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "CANCEL_GRACE_S", 0.05)
    released = asyncio.Event()

    async def episode() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    async def outlast() -> None:
        with pytest.raises(Timeout):
            await limited(episode(), 0.05)
        released.set()

    asyncio.run(outlast())


def test_exceptions_name_their_kind() -> None:
    kinds = [failure_of_exception(e) for e in (Timeout("t"), InferenceFailure("i"), CorruptData("c"), KeyError("k"))]
    assert [(f.kind, f.type) for f in kinds] == [
        ("environment", "Timeout"), ("inference", "InferenceFailure"), ("infrastructure", "CorruptData"),
        ("infrastructure", "KeyError"),
    ]  # fmt: skip


def test_watchdog_speaks_once_the_beat_is_missed() -> None:
    silent, said = threading.Event(), []
    Watchdog(0.2, "waiting", lambda what: (said.append(what), silent.set()))
    assert silent.wait(10)
    assert said == ["waiting for more than 0.2 s"]


def test_watchdog_is_held_off_by_beats() -> None:
    silent = threading.Event()
    watchdog = Watchdog(1.0, "waiting", lambda _: silent.set())
    for _ in range(20):
        watchdog.beat()
        assert not silent.wait(0.1)
