"""The clock of the run: the newest version only, the newest lineage, and damaged weights."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.algorithms.staleness import Lineages
from prime_hpc.cluster import control
from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.errors import CorruptData
from prime_hpc.orchestrator.fleet import UpdateTimes
from prime_hpc.orchestrator.versions import Versions
from prime_hpc.transport.messages import PolicyVersion


class Engines:
    """A fleet that loads one version at a time, as long as the test wants, and refuses damaged ones."""

    def __init__(self, damaged: str = ""):
        self.loaded: list[str] = []
        self.may_load = asyncio.Event()
        self.serves = True
        self.damaged = damaged

    async def update(self, version: PolicyVersion, directory: Path) -> UpdateTimes:
        if str(version) == self.damaged:
            raise CorruptData(f"{directory.name} does not match its digest")
        self.loaded.append(str(version))
        await self.may_load.wait()
        return UpdateTimes(0.0, 0.0)


class Follower:
    """`Versions` at work on weights that a test publishes."""

    def __init__(self, root: Path, damaged: str = ""):
        self.paths = RunPaths(root)
        self.paths.control.mkdir(parents=True)
        role = SimpleNamespace(paths=self.paths, reach=lambda point: None, log=logging.getLogger("test"),
                               process=SimpleNamespace(name="orchestrator-0"))  # fmt: skip
        self.publish("0.0")
        self.engines = Engines(damaged)
        self.versions = Versions(role, self.engines, Lineages([]), 0, 0)

    def publish(self, version: str) -> None:
        self.paths.weights_version(version).mkdir(parents=True)

    async def __aenter__(self) -> "Follower":
        async def nothing(*_: object) -> None: ...

        self._task = asyncio.create_task(self.versions.follow(nothing, nothing))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def until(self, published: str) -> None:
        async with asyncio.timeout(10):
            await self.versions.wait_until(lambda: str(self.versions.published) == published)


def test_engines_that_are_behind_take_the_newest_version_and_none_between(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Follower(tmp_path) as follower:
            follower.publish("0.1")
            await follower.until("0.1")
            for version in ("0.2", "0.3", "0.4"):
                follower.publish(version)
            follower.engines.may_load.set()
            await follower.versions.wait_served(4)
            assert follower.engines.loaded == ["0.1", "0.4"]

    asyncio.run(scenario())


def test_a_version_that_nobody_serves_gives_way_to_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Follower(tmp_path) as follower:
            follower.engines.may_load.set()
            follower.engines.serves = False
            follower.publish("0.1")
            await follower.until("0.1")
            follower.publish("0.2")
            await follower.until("0.2")
            assert str(follower.versions.served) == "0.0"
            follower.engines.serves = True
            async with asyncio.timeout(10):
                while follower.versions.served.step < 2:
                    await asyncio.sleep(0.01)
            assert follower.engines.loaded == ["0.1", "0.2"]

    asyncio.run(scenario())


def test_a_trainer_that_went_back_is_followed_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Follower(tmp_path) as follower:
            follower.engines.may_load.set()
            follower.publish("0.5")
            await follower.versions.wait_served(5)
            write_json(follower.paths.forks, [{"lineage": 1, "step": 3}])
            follower.publish("1.3")
            await follower.until("1.3")
            lineages = follower.versions.lineages
            assert not lineages.alive(PolicyVersion(0, 5)) and lineages.alive(PolicyVersion(0, 3))

    asyncio.run(scenario())


def test_damaged_weights_have_the_trainer_started_anew_while_the_old_ones_serve(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Follower(tmp_path, damaged="0.2") as follower:
            follower.engines.may_load.set()
            follower.publish("0.1")
            await follower.versions.wait_served(1)
            follower.publish("0.2")
            await follower.until("0.2")
            assert str(follower.versions.served) == "0.1"
            async with asyncio.timeout(10):
                while not (requests := control.take(follower.paths.control)):
                    await asyncio.sleep(0.01)
        (request,) = requests
        assert (request.action, request.unit, request.by) == ("restart", "trainer", "orchestrator-0")
        assert request.why == "CorruptData: v0.2 does not match its digest"

    asyncio.run(scenario())


@pytest.mark.parametrize(("shipped", "lead"), [(0, 0), (3, 3)])
def test_the_lead_is_what_was_shipped_and_not_trained(tmp_path: Path, shipped: int, lead: int) -> None:
    follower = Follower(tmp_path)
    follower.versions.shipped = shipped
    assert follower.versions.lead == lead
