"""The engines behind one address: which of them may get requests, and how busy they are."""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import httpx
import msgspec

from prime_hpc.algorithms.engine_choice import choose
from prime_hpc.errors import InferenceFailure
from prime_hpc.inference import protocol
from prime_hpc.transport.messages import PolicyVersion

PROBE_EVERY_S = 1.0
PROBE_S = 5.0
"""An engine that does not answer a probe within this time gets no requests."""
BACKOFF_MAX_S = 30.0
WAIT_S = 60.0
"""A request waits this long for an engine, such as one that is being started again."""


@dataclass(eq=False)
class Backend:
    """An engine. `sent` counts requests that go through here, `others` those that it had besides when it last
    answered; `version` is None while it does not answer."""

    name: str
    base_url: str
    sent: int = 0
    others: int = 0
    version: PolicyVersion | None = None
    paused: bool = False
    draining: bool = False
    failures: int = 0
    probe_at: float = 0.0

    @property
    def load(self) -> int:
        return self.sent + self.others

    def answered(self, state: protocol.EngineState, now: float) -> None:
        self.version, self.paused = PolicyVersion.parse(state.version), state.paused
        self.others = max(0, state.running - self.sent)
        self.failures, self.probe_at = 0, now + PROBE_EVERY_S

    def failed(self, now: float) -> None:
        """It gets no more requests before it has answered a probe, which is tried ever more rarely."""
        self.version = None
        self.failures += 1
        self.probe_at = now + min(PROBE_EVERY_S * 2 ** (self.failures - 1), BACKOFF_MAX_S)


def in_rotation(backends: Collection[Backend]) -> list[Backend]:
    """Those that answer and are not drained, of the newest version among them; paused ones only if there are no others.

    So an engine that was started again is left out until it has caught up.
    """
    up = [backend for backend in backends if backend.version is not None and not backend.draining]
    newest = max((backend.version for backend in up if backend.version), default=None)
    current = [backend for backend in up if backend.version == newest]
    return [backend for backend in current if not backend.paused] or current


class Pool:
    """All engines. `look` gives their addresses by name, None for one that is not there."""

    def __init__(self, look: Callable[[], dict[str, str | None]], http: httpx.AsyncClient):
        self.backends: dict[str, Backend] = {}
        self._look, self._http = look, http
        self._changed = asyncio.Condition()

    async def pick(self, session: str, tried: Collection[Backend] = ()) -> Backend:
        """The engine for a request of `session`, as soon as there is one that was not `tried`.

        Raises:
            InferenceFailure: there is none for `WAIT_S` seconds.
        """

        def free() -> list[Backend]:
            return [backend for backend in in_rotation(self.backends.values()) if backend not in tried]

        try:
            async with asyncio.timeout(WAIT_S), self._changed:
                await self._changed.wait_for(free)
                return choose(free(), session)
        except TimeoutError:
            raise InferenceFailure(
                f"no engine could take the request for {WAIT_S:.0f} s; see the fleet's status"
            ) from None

    def drain(self, name: str, on: bool) -> None:
        """Send no more requests to an engine, or again.

        Raises:
            ValueError: there is no such engine.
        """
        if name not in self.backends:
            raise ValueError(f"no engine {name!r}: expected one of {', '.join(self.backends)}")
        self.backends[name].draining = on

    async def watch(self, progress: Callable[[str], None]) -> None:
        """Follow the engines until cancelled; `progress` is told how many are in rotation."""
        while True:
            self._follow(await asyncio.to_thread(self._look))
            now = time.monotonic()
            await asyncio.gather(*(self._probe(b) for b in self.backends.values() if b.probe_at <= now))
            progress(f"{len(in_rotation(self.backends.values()))} of {len(self.backends)} engines in rotation")
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(PROBE_EVERY_S / 2)

    def _follow(self, addresses: dict[str, str | None]) -> None:
        """Forget engines that have another address than before, or none, and take in new ones."""
        for name, base_url in addresses.items():
            if name in self.backends and self.backends[name].base_url == base_url:
                continue
            self.backends.pop(name, None)
            if base_url:
                self.backends[name] = Backend(name, base_url)

    async def _probe(self, backend: Backend) -> None:
        try:
            reply = await self._http.get(f"{backend.base_url}{protocol.STATE}", timeout=PROBE_S)
            reply.raise_for_status()
            backend.answered(msgspec.json.decode(reply.content, type=protocol.EngineState), time.monotonic())
        except httpx.HTTPError:
            backend.failed(time.monotonic())
