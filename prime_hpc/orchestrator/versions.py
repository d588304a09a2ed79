"""Which policy version the trainer has published, which one the engines serve, and how far batches are ahead."""

import asyncio
from collections.abc import Awaitable, Callable

from prime_hpc.algorithms.staleness import Lineages
from prime_hpc.cluster.role import Role
from prime_hpc.orchestrator.fleet import Fleet, UpdateTimes
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import published_versions

POLL_S = 0.05

OnUpdate = Callable[[PolicyVersion, UpdateTimes], Awaitable[None]]


class Versions:
    """The clock of the run: `published` and `served` only grow, `shipped` counts batches that were cut."""

    def __init__(self, role: Role, fleet: Fleet, lineages: Lineages, start_step: int):
        self.published = PolicyVersion(lineages.current, start_step)
        self.served = self.published
        self.shipped = start_step
        self.lineages = lineages
        self.changed = asyncio.Condition()
        self._weights = role.paths.weights
        self._version_dir = role.paths.weights_version
        self._fleet = fleet
        self._log = role.log

    @property
    def lead(self) -> int:
        """Batches that were shipped and are not trained yet."""
        return self.shipped - self.published.step

    async def first(self, timeout_s: float) -> None:
        """Wait for the weights the run starts from and load them into every engine: a broken path fails early."""
        async with asyncio.timeout(timeout_s):
            while self.published not in published_versions(self._weights):
                await asyncio.sleep(POLL_S)
        await self._serve(self.published)

    async def follow(self, on_published: Callable[[], Awaitable[None]], on_update: OnUpdate) -> None:
        """Load every newer version as it appears, the newest only, until cancelled."""
        while True:
            newest = max((v for v in published_versions(self._weights) if v.lineage == self.lineages.current),
                         default=self.published)  # fmt: skip
            if newest > self.published:
                self.published = newest
                await on_published()
                await self._notify()
                await on_update(newest, await self._serve(newest))
                await self._notify()
            await asyncio.sleep(POLL_S)

    async def wait_served(self, step: int) -> None:
        """Return once the engines serve version `step` or a newer one."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.served.step >= step)

    async def wait_published(self, step: int) -> None:
        """Return once the trainer has published version `step` or a newer one."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.published.step >= step)

    async def _serve(self, version: PolicyVersion) -> UpdateTimes:
        times = await self._fleet.update(version, self._version_dir(str(version)))
        self.served = version
        self._log.info("engines serve v%s (load %.2f s, pause %.2f s)", version, times.load_s, times.pause_s)
        return times

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
