"""Engines of another run: what they must be before this run uses them, and the claim on them while it does."""

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import httpx

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.role import Role
from prime_hpc.config.fleet_checks import KEY
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models.fingerprint import fingerprint
from prime_hpc.observe.resumption import find_ended_fleet
from prime_hpc.observe.run_facts import read_run

CLAIM_S = 60.0
"""A claim that is not renewed ends after this."""
RENEW_S = 10.0
ANSWER_S = 10.0
"""An engine that answers no renewal within this time is passed over until the next."""
POLL_S = 1.0
"""Between looks at a claim of another run that is about to end."""
REFUSED, IN_USE = 401, 409

Reply = httpx.Response | httpx.HTTPError


class Addressed(Protocol):
    """An engine as far as it is asked here."""

    name: str
    base_url: str


class Attachment:
    """The claim of this run on engines that outlive it; with engines of its own, nothing happens here."""

    def __init__(self, role: Role, http: httpx.AsyncClient):
        self._config, self._http, self._log, self._heart = role.config, http, role.log, role.heart
        self._model = Path(role.config.model.path)
        self.holder = str(role.paths.root) if role.config.inference.attach.on else ""
        """The name of the claim."""
        self._keeping: asyncio.Task[None] | None = None

    async def claim(self, engines: Sequence[Addressed]) -> None:
        """Claim all `engines` until `release`, also those that `engines` comes to hold later.

        Waits for claims of runs that are no longer at work, which end by themselves.

        Raises:
            ConfigurationError: a problem for each engine that does not answer, refuses the token, is used otherwise, or
                serves another model, another version or shorter sequences than this run needs.
        """
        if not self.holder:
            return
        expected = fingerprint(self._model)
        with self._heart.waiting("the claims of other runs to end", engines[0].name, CLAIM_S):
            replies = await self._ask(engines)
        found = [self._check(engine, reply, expected) for engine, reply in zip(engines, replies, strict=True)]
        problems = [problem for problem in found if problem]
        if problems:
            await self.release(engines)
            raise ConfigurationError(problems)
        self._keeping = asyncio.create_task(self._keep(engines))

    async def release(self, engines: Sequence[Addressed]) -> None:
        """Give the claim back; where an engine does not hear of it, it ends by itself."""
        if self._keeping:
            self._keeping.cancel()
        if self.holder:
            await asyncio.gather(*(_answer(self._claim(engine, 0.0, ANSWER_S)) for engine in engines))

    async def _ask(self, engines: Sequence[Addressed]) -> list[Reply]:
        """What the engines answer to the claim, once none is held that nobody renews."""
        left: dict[str, float] = {}
        while True:
            timeout_s = self._config.update.timeout_s
            replies = await asyncio.gather(*(_answer(self._claim(engine, CLAIM_S, timeout_s)) for engine in engines))
            held = {engine.name: reply.json() for engine, reply in zip(engines, replies, strict=True) if in_use(reply)}
            for name, claim in held.items():
                if claim["seconds"] > left.get(name, CLAIM_S) or await asyncio.to_thread(_at_work, claim["holder"]):
                    return replies
                if name not in left:
                    self._log.info("%s is held by %s for %.0f s, unless that renews it: waiting", name, claim["holder"],
                                   claim["seconds"])  # fmt: skip
            if not held:
                return replies
            left = {name: claim["seconds"] for name, claim in held.items()}
            await asyncio.sleep(POLL_S)

    async def _keep(self, engines: Sequence[Addressed]) -> None:
        """Renew the claim until cancelled. An engine that another has claimed since refuses this run's weights."""
        while True:
            await asyncio.sleep(RENEW_S)
            await asyncio.gather(*map(self._renew, engines))

    async def _renew(self, engine: Addressed) -> None:
        reply = await _answer(self._claim(engine, CLAIM_S, ANSWER_S))
        if isinstance(reply, httpx.HTTPError) or reply.status_code != httpx.codes.OK:
            said = reply.text if isinstance(reply, httpx.Response) else f"{type(reply).__name__} {reply}"
            self._log.warning("%s does not take this run's claim: %s", engine.name, said)

    def _claim(self, engine: Addressed, seconds: float, timeout_s: float) -> Awaitable[httpx.Response]:
        body = {"holder": self.holder, "seconds": seconds, "exclusive": self._config.mode == "rl"}
        return self._http.post(f"{engine.base_url}/prime_hpc/claim", json=body, timeout=timeout_s)

    def _check(self, engine: Addressed, reply: Reply, model: str) -> ConfigProblem | None:
        where = f"{engine.name} at {engine.base_url}"
        if isinstance(reply, httpx.HTTPError):
            silent = ConfigProblem(KEY, where, f"an engine that answers, not {type(reply).__name__} {reply}")
            fleet = self._config.inference.attach.run
            return (find_ended_fleet(Path(fleet)) if fleet is not None else None) or silent
        if reply.status_code == REFUSED:
            return ConfigProblem(KEY, where, "the token of these engines: with `urls`, the one in `token_file`")
        if in_use(reply):
            return ConfigProblem(KEY, where, f"an engine that is free; {reply.json()['error']}")
        if reply.status_code != httpx.codes.OK:
            return ConfigProblem(KEY, where, f"an engine of this product; it answered {reply.status_code}")
        return self._compare(where, reply.json(), model)

    def _compare(self, where: str, state: dict[str, Any], model: str) -> ConfigProblem | None:
        """What is wrong with an engine's state; a run that trains brings weights of its own."""
        if state["fingerprint"] != model:
            return ConfigProblem(KEY, where, f"an engine that was started with the model in {self._model}")
        name, length = self._config.model.served_name, self._config.seq_len
        if state["model"] != name:
            return ConfigProblem("model.served_name", name, f"{state['model']}, as {where} has")
        if state["max_model_len"] < length:
            return ConfigProblem("seq_len", length, f"at most {state['max_model_len']}, as {where} has")
        expected = self._config.inference.attach.version
        if self._config.mode != "rl" and state["version"] != expected:
            return ConfigProblem(
                f"{KEY}.version", expected, f"{state['version']}, which {where} serves; or a new fleet"
            )
        return None


def in_use(reply: Reply) -> TypeGuard[httpx.Response]:
    """Whether an engine refused a claim since another run has one."""
    return isinstance(reply, httpx.Response) and reply.status_code == IN_USE


def _at_work(holder: str) -> bool:
    """Whether the run that holds a claim is known to be; its directory may be out of sight."""
    return RunPaths(Path(holder)).plan.exists() and read_run(Path(holder)).live


async def _answer(request: Awaitable[httpx.Response]) -> Reply:
    try:
        return await request
    except httpx.HTTPError as error:
        return error
