"""Which policy version the trainer has published, which one the engines serve, and how far batches are ahead."""

import asyncio
from collections.abc import Awaitable, Callable

from prime_hpc.algorithms.staleness import Lineages
from prime_hpc.cluster import control
from prime_hpc.cluster.role import Role
from prime_hpc.errors import CorruptData
from prime_hpc.orchestrator.fleet import Fleet, UpdateTimes
from prime_hpc.plan.run_plan import read_forks
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import published_versions

POLL_S = 0.05

OnUpdate = Callable[[PolicyVersion, UpdateTimes], Awaitable[None]]


class Versions:
    """The clock of the run: `published` and `served` go back only where the trainer did; `shipped` counts batches."""

    def __init__(self, role: Role, fleet: Fleet, lineages: Lineages, start_step: int, shipped: int):
        self._role, self._fleet = role, fleet
        self._weights = role.paths.weights
        self.lineages = lineages
        self.published = self._newest() or PolicyVersion(lineages.current, start_step)
        self.served = self.published
        self.shipped = shipped
        self.changed = asyncio.Condition()

    @property
    def lead(self) -> int:
        """Batches that were shipped and are not trained yet."""
        return self.shipped - self.published.step

    async def first(self, timeout_s: float) -> None:
        """Wait for the weights the run starts from and load them into every engine: a broken path fails early."""
        with self._role.heart.waiting(f"weights v{self.published}", "trainer-0", timeout_s):
            async with asyncio.timeout(timeout_s):
                while self.published not in published_versions(self._weights):
                    await asyncio.sleep(POLL_S)
        while await self._serve(self.published) is None:
            self.published = self._newest() or self.published

    async def follow(self, on_published: Callable[[], Awaitable[None]], on_update: OnUpdate) -> None:
        """Load every newer version as it appears, the newest only, until cancelled.

        A version of a newer lineage means that the trainer went back: its history is read anew.
        """
        while True:
            newest = self._newest()
            if newest and newest > self.published:
                self.published = newest
                await on_published()
                await self.notify()
                await self._update(newest, on_update)
            await asyncio.sleep(POLL_S)

    async def _update(self, version: PolicyVersion, on_update: OnUpdate) -> None:
        """Serve `version`; where its files are damaged, the old one goes on serving and the trainer is asked anew."""
        try:
            times = await self._serve(version)
        except CorruptData as error:
            self._role.log.error("%s; the trainer is started again", error)
            control.ask(self._role.paths.control, "restart", f"CorruptData: {error}", unit="trainer",
                        by=self._role.process.name)  # fmt: skip
            return
        if times:
            await on_update(version, times)
            await self.notify()

    def _newest(self) -> PolicyVersion | None:
        """The newest version of the newest lineage."""
        newest = max(published_versions(self._weights), default=None)
        if newest and newest.lineage > self.lineages.current:
            self.lineages.replace(read_forks(self._role.paths.forks))
            self._role.log.info("the trainer went back to v%s", newest)
        return newest

    async def wait_served(self, step: int) -> None:
        """Return once the engines serve version `step` or a newer one."""
        await self.wait_until(lambda: self.served.step >= step)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; it is looked at whenever a version is published or served, and on `notify`."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _serve(self, version: PolicyVersion) -> UpdateTimes | None:
        """Return once an engine serves `version`, and None where none does and there is a newer one to try."""
        self._role.reach("update.before")
        times = await self._fleet.update(version, self._role.paths.weights_version(str(version)))
        while not self._fleet.serves:
            if (self._newest() or version) > version:
                return None
            await asyncio.sleep(POLL_S)
        self.served = version
        self._role.reach("update.after")
        self._role.log.info("engines serve v%s (load %.2f s, pause %.2f s)", version, times.load_s, times.pause_s)
        return times

    async def notify(self) -> None:
        """Have everybody who waits look again."""
        async with self.changed:
            self.changed.notify_all()
