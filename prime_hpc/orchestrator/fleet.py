"""The engines as the orchestrator sees them: addresses, load, and weight updates that it drives itself."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from prime_hpc.cluster.role import Role
from prime_hpc.errors import CorruptData, InferenceFailure
from prime_hpc.transport.messages import PolicyVersion


@dataclass
class Engine:
    """One engine replica. `load` counts the rollouts that were sent to it."""

    name: str
    base_url: str
    load: int = 0


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of one weight update: engines loading, and requests held back."""

    load_s: float
    pause_s: float


class Fleet:
    """All engines of the run."""

    def __init__(self, role: Role, engines: list[Engine]):
        self.engines = engines
        self._kv = role.config.update.kv
        self._log = role.log
        headers = {"Authorization": f"Bearer {role.secrets.token}"}
        self._http = httpx.AsyncClient(headers=headers, timeout=role.config.update.timeout_s)

    @classmethod
    async def connect(cls, role: Role) -> "Fleet":
        """Wait until every engine of the plan has published its address."""
        names = [p.name for p in role.plan.engines()]
        wait = role.rendezvous.wait
        timeout_s = role.config.inference.start_timeout_s
        urls = await asyncio.gather(*(asyncio.to_thread(wait, name, "base_url", timeout_s) for name in names))
        return cls(role, [Engine(name, url) for name, url in zip(names, urls, strict=True)])

    def pick(self) -> Engine:
        """The engine with the least rollouts."""
        return min(self.engines, key=lambda e: e.load)

    async def update(self, version: PolicyVersion, directory: Path) -> UpdateTimes:
        """Pause, load and resume every engine; requests in flight are kept.

        Raises:
            CorruptData: the weights do not match their manifest; the old version still serves.
            InferenceFailure: an engine did not take the update.
        """
        begin = time.monotonic()
        await self._all("pause", {"kv": self._kv})
        try:
            answers = await self._all("load", {"version": str(version), "path": str(directory)})
        finally:
            await self._all("resume", {})
        return UpdateTimes(load_s=max(a["seconds"] for a in answers), pause_s=time.monotonic() - begin)

    async def close(self) -> None:
        await self._http.aclose()

    async def _all(self, route: str, body: dict[str, str]) -> list[dict]:
        return await asyncio.gather(*(self._post(engine, route, body) for engine in self.engines))

    async def _post(self, engine: Engine, route: str, body: dict[str, str]) -> dict:
        try:
            reply = await self._http.post(f"{engine.base_url}/prime_hpc/{route}", json=body)
        except httpx.HTTPError as error:
            raise InferenceFailure(f"{engine.name} did not answer {route}: {type(error).__name__} {error}") from error
        if reply.status_code == 422:
            raise CorruptData(f"{engine.name} refused {route}: {reply.json().get('error', reply.text)}")
        if reply.status_code != 200:
            raise InferenceFailure(f"{engine.name} answered {route} with {reply.status_code}: {reply.text[:500]}")
        return reply.json()
