"""The engines as the orchestrator sees them: who serves, how busy it is, and weight updates that it drives itself."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from prime_hpc.algorithms.engine_choice import choose
from prime_hpc.cluster.files import write_atomic
from prime_hpc.cluster.role import Role
from prime_hpc.errors import CorruptData, InferenceFailure
from prime_hpc.orchestrator import canary
from prime_hpc.orchestrator.attached import Attachment
from prime_hpc.orchestrator.directory import Directory, directory_of
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import (
    RECEIVERS,
    Receiver,
    WeightsManifest,
    read_manifest,
)

WATCH_S = 0.5
PROBE_S = 5.0
"""An engine that does not answer a probe within this time stays out."""
MARGIN_S = 5.0
"""What an answer over HTTP may take longer than the work that it reports."""

AskWhole = Callable[[PolicyVersion], Awaitable[None]]


@dataclass(eq=False)
class Engine:
    """One engine replica. `load` counts the rollouts that were sent to it; only one that is `serving` gets more.

    `link` is the name of its link with the trainer, where weights are streamed; a new one is made after every failure.
    """

    name: str
    base_url: str
    load: int = 0
    serving: bool = False
    link: str | None = None


@dataclass(frozen=True)
class UpdateTimes:
    """Of one weight update: seconds of preparing it beside the requests, of loading, and that requests stood still;
    the canary's mean absolute difference, where it was due, and the seconds until it was known."""

    load_s: float
    pause_s: float
    prepare_s: float = 0.0
    canary: float | None = None
    canary_s: float = 0.0


@dataclass(frozen=True)
class _Target:
    """The weights that every engine is to serve."""

    version: PolicyVersion
    directory: Path
    manifest: WeightsManifest

    @classmethod
    def read(cls, version: PolicyVersion, directory: Path) -> "_Target":
        return cls(version, directory, read_manifest(directory))


class Fleet:
    """All engines of the run. One that fails leaves the rotation and comes back once it serves the current version.

    `ask_whole` asks the trainer to write a version that was only streamed, when nobody is left to serve it.
    """

    def __init__(self, role: Role, engines: list[Engine], directory: Directory, ask_whole: AskWhole | None = None):
        self.engines = engines
        self._role, self._directory = role, directory
        self._ask_whole = ask_whole
        self._target: _Target | None = None
        self._updating = asyncio.Lock()
        self._changed = asyncio.Condition()
        headers = {"Authorization": f"Bearer {role.secrets.token}"}
        self._http = httpx.AsyncClient(headers=headers, timeout=role.config.update.timeout_s)
        self._attachment = Attachment(role, self._http)

    @classmethod
    async def connect(cls, role: Role, ask_whole: AskWhole | None = None) -> "Fleet":
        """Wait until every engine has an address; engines of another run are checked and claimed.

        Raises:
            ConfigurationError: they are not what this run needs.
        """
        timeout_s, directory = role.config.inference.start_timeout_s, directory_of(role)
        with role.heart.waiting("the engines' addresses", "inference-0", timeout_s):
            addresses = await asyncio.to_thread(directory.wait, timeout_s)
        fleet = cls(role, [Engine(name, url, serving=True) for name, url in addresses.items()], directory, ask_whole)
        await fleet._attachment.claim(fleet.engines)
        return fleet

    @property
    def serves(self) -> bool:
        """Whether any engine does."""
        return any(engine.serving for engine in self.engines)

    async def pick(self) -> Engine:
        """The serving engine with the least rollouts, as soon as there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.serves)
        return choose([e for e in self.engines if e.serving])

    def suspect(self, engine: Engine) -> None:
        """A request to `engine` failed: it gets no more until it has answered a probe."""
        engine.serving = False

    async def update(self, version: PolicyVersion, directory: Path) -> UpdateTimes:
        """Put `version` in force on every serving engine; requests in flight are kept.

        Returns once each has it or, having failed, is left behind; that may be all of them.

        Raises:
            CorruptData: no engine took the weights since they do not match their manifest; the old version serves.
        """
        async with self._updating:
            self._target = target = await asyncio.to_thread(_Target.read, version, directory)
            if target.manifest.stream:
                outcomes = await self._take_stream(target)
            else:
                outcomes = await asyncio.gather(*(self._try(e, target) for e in self.engines if e.serving))
        times = [o for o in outcomes if isinstance(o, UpdateTimes)]
        corrupt = [o for o in outcomes if isinstance(o, CorruptData)]
        if corrupt and not times:
            raise corrupt[0]
        return _slowest(times)

    async def watch(self) -> None:
        """Let engines go that are gone and take in those that have come (back), until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            for name, base_url in (await asyncio.to_thread(self._directory.look)).items():
                self._follow(name, base_url)
            async with self._updating:
                await asyncio.gather(*(self._take_in(e) for e in self.engines if not e.serving))

    async def close(self) -> None:
        """Let the engines go; those of another run stay as they are."""
        await self._attachment.release(self.engines)
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
        """Bring an engine that answers to the current version and into the rotation.

        Where nobody trains there is no version but the one that an engine has loaded by itself.
        """
        state = await self._probe(engine)
        if state is None:
            return
        wanted = self._target.version if self._target else self._role.config.inference.attach.version
        if state["version"] == str(wanted) and not state["paused"]:
            await self._admit(engine)
        if engine.serving or self._target is None:
            return
        target = await asyncio.to_thread(_Target.read, self._target.version, self._target.directory)
        if target.manifest.in_files:
            if isinstance(await self._try(engine, target), UpdateTimes):
                self._role.log.info("%s has caught up with v%s", engine.name, target.version)
        elif self._ask_whole and not target.manifest.stream and not self.serves:
            await self._ask_whole(target.version)

    async def _probe(self, engine: Engine) -> dict[str, Any] | None:
        """The state of an engine, None where it does not answer."""
        try:
            return await self._call(engine, self._http.get(f"{engine.base_url}/prime_hpc/state", timeout=PROBE_S))
        except InferenceFailure:
            return None

    async def _take_stream(self, target: _Target) -> list[UpdateTimes | CorruptData | InferenceFailure]:
        """Have every engine that answers, also one that lags behind, take part in a stream.

        All are connected before the first stops sampling, as the stream waits for the last.
        """
        asked = await self._invite(target)
        prepared = await asyncio.gather(*(self._try_prepare(e, target) for e in asked))
        ready = [(e, seconds) for e, seconds in zip(asked, prepared, strict=True) if isinstance(seconds, float)]
        loaded = await asyncio.gather(*(self._try(e, target, seconds) for e, seconds in ready))
        return [*loaded, *(p for p in prepared if not isinstance(p, float))]

    async def _invite(self, target: _Target) -> list[Engine]:
        """Tell the trainer which engines take part; one that serves and does not answer is left behind."""
        engines = list(self.engines)
        states = dict(zip(engines, await asyncio.gather(*(self._probe(e) for e in engines)), strict=True))
        for engine in engines:
            if states[engine]:
                engine.link = engine.link or f"{engine.name}.{uuid.uuid4().hex[:8]}"
            elif engine.serving:
                self._leave_behind(engine, InferenceFailure(f"it gave no answer for {PROBE_S:.0f} s"))
        asked = {engine: state for engine, state in states.items() if state}
        receivers = {e.name: Receiver(link=str(e.link), workers=state["workers"]) for e, state in asked.items()}
        write_atomic(target.directory / RECEIVERS, msgspec.json.encode(receivers), durable=False)
        return list(asked)

    async def _try(
        self, engine: Engine, target: _Target, prepare_s: float | None = None
    ) -> UpdateTimes | CorruptData | InferenceFailure:
        """Update one engine; where that fails it leaves the rotation. It was prepared if `prepare_s` is given."""
        try:
            if prepare_s is None:
                prepare_s = await self._prepare(engine, target)
            times = await self._load(engine, target, prepare_s)
        except (CorruptData, InferenceFailure) as error:
            return self._leave_behind(engine, error)
        await self._admit(engine)
        return times

    async def _try_prepare(self, engine: Engine, target: _Target) -> float | CorruptData | InferenceFailure:
        try:
            return await self._prepare(engine, target)
        except (CorruptData, InferenceFailure) as error:
            return self._leave_behind(engine, error)

    def _leave_behind(self, engine: Engine, error: CorruptData | InferenceFailure) -> CorruptData | InferenceFailure:
        self._role.log.error("%s stays behind: %s", engine.name, error)
        engine.serving, engine.link = False, None
        return error

    async def _prepare(self, engine: Engine, target: _Target) -> float:
        """Seconds in which the engine fetched and checked files, or connected with the trainer."""
        begin = time.monotonic()
        with self._role.heart.waiting(f"weights v{target.version} at hand", engine.name, self._http.timeout.read):
            await self._post(engine, "prepare", self._request(engine, target))
        return time.monotonic() - begin

    async def _load(self, engine: Engine, target: _Target, prepare_s: float) -> UpdateTimes:
        update = self._role.config.update
        with self._role.heart.waiting(f"weights v{target.version} in force", engine.name, self._http.timeout.read):
            pause = {"kv": update.kv, "drain_s": update.drain_s}
            await self._post(engine, "pause", pause, timeout_s=update.ready_s + MARGIN_S)
            self._role.reach("update.during")
            try:
                answer = await self._post(engine, "load", self._request(engine, target))
            finally:
                state = await self._post(engine, "resume", {}, timeout_s=update.stall_s)
        begin = time.monotonic()
        difference = await self._check_canary(engine, target)
        canary_s = time.monotonic() - begin
        return UpdateTimes(answer["seconds"], state["pause_s"], prepare_s, difference, canary_s)

    async def _check_canary(self, engine: Engine, target: _Target) -> float | None:
        """Compare the engine's scores with the trainer's, where the version carries any.

        Raises:
            InferenceFailure: they differ by more than the bound; the engine is started again.
        """
        expected = target.manifest.canary
        if expected is None:
            return None
        scores = await self._post(engine, "score", {"token_ids": expected.token_ids})
        difference = canary.difference(scores["logprobs"], expected)
        if difference <= self._role.config.update.canary_bound:
            return difference
        raise await self._wrong_weights(engine, target, difference)

    async def _wrong_weights(self, engine: Engine, target: _Target, difference: float) -> InferenceFailure:
        """What is wrong with an engine that scores otherwise than the trainer; it is started again."""
        theirs = await self._checksums(engine)
        others = [e for e in self.engines if e.serving and e is not engine]
        states = {e: await self._probe(e) for e in others}
        peer = next((e for e, state in states.items() if state and state["version"] == str(target.version)), None)
        if peer:
            groups = canary.differing(theirs, await self._checksums(peer))
        elif target.manifest.in_files:
            await self._post(engine, "load", self._request(engine, target, link=False))
            groups = canary.differing(theirs, await self._checksums(engine))
        else:
            groups = []
        error = canary.wrong_weights(engine.name, target.version, difference, groups)
        self._directory.ask_restart(engine.name, str(error))
        return error

    async def _checksums(self, engine: Engine) -> list[dict[str, str]]:
        url = f"{engine.base_url}/prime_hpc/checksums"
        return (await self._call(engine, self._http.get(url)))["workers"]

    async def _admit(self, engine: Engine) -> None:
        engine.serving = True
        async with self._changed:
            self._changed.notify_all()

    def _request(self, engine: Engine, target: _Target, *, link: bool = True) -> dict[str, str | None]:
        """How an engine is told to prepare and to load."""
        by_link = engine.link if link and target.manifest.stream else None
        return {"version": str(target.version), "path": str(target.directory), "link": by_link,
                "holder": self._attachment.holder}  # fmt: skip

    async def _post(self, engine: Engine, route: str, body: dict[str, Any], timeout_s: float | None = None) -> dict:
        timeout = self._http.timeout if timeout_s is None else timeout_s
        url = f"{engine.base_url}/prime_hpc/{route}"
        return await self._call(engine, self._http.post(url, json=body, timeout=timeout))

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


def _slowest(times: list[UpdateTimes]) -> UpdateTimes:
    """The most of each figure over all engines."""
    canaries = [t.canary for t in times if t.canary is not None]
    return UpdateTimes(
        load_s=max((t.load_s for t in times), default=0.0),
        pause_s=max((t.pause_s for t in times), default=0.0),
        prepare_s=max((t.prepare_s for t in times), default=0.0),
        canary=max(canaries, default=None),
        canary_s=max((t.canary_s for t in times), default=0.0),
    )
