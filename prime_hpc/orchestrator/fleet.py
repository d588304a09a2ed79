"""The engines as the orchestrator sees them: who serves, how busy it is, and weight updates that it drives itself."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import httpx

from prime_hpc.cluster.role import Role
from prime_hpc.errors import CorruptData, InferenceFailure
from prime_hpc.transport.messages import PolicyVersion

WATCH_S = 0.5
PROBE_S = 5.0
"""An engine that does not answer a probe within this time stays out."""


@dataclass(eq=False)
class Engine:
    """One engine replica. `load` counts the rollouts that were sent to it; only one that is `serving` gets more."""

    name: str
    base_url: str
    load: int = 0
    serving: bool = False


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of one weight update: engines loading, and requests held back."""

    load_s: float
    pause_s: float


@dataclass(frozen=True)
class _Target:
    """The weights that every engine is to serve."""

    version: PolicyVersion
    directory: Path


class Fleet:
    """All engines of the run. One that fails leaves the rotation and comes back once it serves the current version."""

    def __init__(self, role: Role, engines: list[Engine]):
        self.engines = engines
        self._role = role
        self._names = [p.name for p in role.plan.engines()]
        self._target: _Target | None = None
        self._updating = asyncio.Lock()
        self._changed = asyncio.Condition()
        headers = {"Authorization": f"Bearer {role.secrets.token}"}
        self._http = httpx.AsyncClient(headers=headers, timeout=role.config.update.timeout_s)

    @classmethod
    async def connect(cls, role: Role) -> "Fleet":
        """Wait until every engine of the plan has published its address."""
        timeout_s = role.config.inference.start_timeout_s

        async def find(name: str) -> Engine:
            base_url = await asyncio.to_thread(role.rendezvous.wait, name, "base_url", timeout_s)
            return Engine(name, base_url, serving=True)

        with role.heart.waiting("the engines' addresses", "inference-0", timeout_s):
            return cls(role, await asyncio.gather(*(find(p.name) for p in role.plan.engines())))

    async def pick(self) -> Engine:
        """The serving engine with the least rollouts, as soon as there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(e.serving for e in self.engines))
        return min((e for e in self.engines if e.serving), key=lambda e: e.load)

    def suspect(self, engine: Engine) -> None:
        """A request to `engine` failed: it gets no more until it has answered a probe."""
        engine.serving = False

    async def update(self, version: PolicyVersion, directory: Path) -> UpdateTimes:
        """Put `version` in force on every serving engine; requests in flight are kept.

        Returns once at least one engine serves it; an engine that fails meanwhile is left behind.

        Raises:
            CorruptData: no engine took the weights since they do not match their manifest; the old version serves.
        """
        async with self._updating:
            self._target = _Target(version, directory)
            outcomes = await asyncio.gather(*(self._try(e) for e in self.engines if e.serving))
        times = [o for o in outcomes if isinstance(o, UpdateTimes)]
        corrupt = [o for o in outcomes if isinstance(o, CorruptData)]
        if corrupt and not times:
            raise corrupt[0]
        async with self._changed:
            await self._changed.wait_for(lambda: any(e.serving for e in self.engines))
        return UpdateTimes(max((t.load_s for t in times), default=0.0), max((t.pause_s for t in times), default=0.0))

    async def watch(self) -> None:
        """Let engines go that are gone and take in those that have come (back), until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            records = await asyncio.to_thread(lambda: {name: self._role.rendezvous.read(name) for name in self._names})
            for name, record in records.items():
                self._follow(name, record and record.get("base_url"))
            async with self._updating:
                await asyncio.gather(*(self._take_in(e) for e in self.engines if not e.serving))

    async def close(self) -> None:
        await self._http.aclose()

    def _follow(self, name: str, base_url: str | None) -> None:
        """Replace the engine called `name` where it has another address than before, or none any more."""
        known = next((e for e in self.engines if e.name == name), None)
        if known and known.base_url == base_url:
            return
        if known:
            self._role.log.warning("%s left the rotation", name)
            known.serving = False
            self.engines.remove(known)
        if base_url:
            self.engines.append(Engine(name, base_url))

    async def _take_in(self, engine: Engine) -> None:
        """Bring an engine that answers to the current version and into the rotation."""
        try:
            state = await self._call(engine, self._http.get(f"{engine.base_url}/prime_hpc/state", timeout=PROBE_S))
        except InferenceFailure:
            return
        if self._target is None:
            return
        if state["version"] == str(self._target.version) and not state["paused"]:
            await self._admit(engine)
        elif isinstance(await self._try(engine), UpdateTimes):
            self._role.log.info("%s has caught up with v%s", engine.name, self._target.version)

    async def _try(self, engine: Engine) -> UpdateTimes | CorruptData | InferenceFailure:
        """Update one engine; where that fails it leaves the rotation."""
        try:
            times = await self._load(engine)
        except (CorruptData, InferenceFailure) as error:
            self._role.log.error("%s stays behind: %s", engine.name, error)
            engine.serving = False
            return error
        await self._admit(engine)
        return times

    async def _load(self, engine: Engine) -> UpdateTimes:
        target = self._target
        weights = {"version": str(target.version), "path": str(target.directory)}
        begin = time.monotonic()
        with self._role.heart.waiting(f"weights v{target.version} in force", engine.name, self._http.timeout.read):
            await self._post(engine, "pause", {"kv": self._role.config.update.kv})
            self._role.reach("update.during")
            try:
                answer = await self._post(engine, "load", weights)
            finally:
                await self._post(engine, "resume", {})
        return UpdateTimes(load_s=answer["seconds"], pause_s=time.monotonic() - begin)

    async def _admit(self, engine: Engine) -> None:
        engine.serving = True
        async with self._changed:
            self._changed.notify_all()

    async def _post(self, engine: Engine, route: str, body: dict[str, str]) -> dict:
        return await self._call(engine, self._http.post(f"{engine.base_url}/prime_hpc/{route}", json=body))

    async def _call(self, engine: Engine, request: Awaitable[httpx.Response]) -> dict:
        try:
            reply = await request
        except httpx.HTTPError as error:
            raise InferenceFailure(f"{engine.name} did not answer: {type(error).__name__} {error}") from error
        if reply.status_code == 422:
            raise CorruptData(f"{engine.name} refused the weights: {reply.json().get('error', reply.text)}")
        if reply.status_code != 200:
            said = f"{reply.url.path} with {reply.status_code}: {reply.text[:500]}"
            raise InferenceFailure(f"{engine.name} answered {said}")
        return reply.json()
