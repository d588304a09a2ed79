"""Which engine gets a request, when one gets none, and what the router does where an engine breaks."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
import pytest

from prime_hpc.algorithms.engine_choice import choose
from prime_hpc.inference.protocol import EngineState
from prime_hpc.inference.router import pool as pools
from prime_hpc.inference.router.pool import Backend, Pool, in_rotation
from prime_hpc.inference.router.proxy import application
from prime_hpc.transport.messages import PolicyVersion

SESSIONS = [f"session-{i}" for i in range(600)]
TOKEN = {"Authorization": "Bearer secret"}


@dataclass
class Candidate:
    name: str
    load: int = 0


def fleet(*loads: int) -> list[Candidate]:
    return [Candidate(f"inference-{i}", load) for i, load in enumerate(loads)]


def state(version: str = "0.0", *, paused: bool = False, running: int = 0) -> EngineState:
    return EngineState(version=version, paused=paused, running=running, engine="fake", max_model_len=64, workers=1)


def test_without_a_session_the_least_busy_engine_is_chosen() -> None:
    assert choose(fleet(3, 1, 1)).name == "inference-1"


def test_sessions_stay_and_move_only_when_their_engine_leaves() -> None:
    engines = fleet(0, 0, 0)
    before = {session: choose(engines, session).name for session in SESSIONS}
    assert before == {session: choose(engines, session).name for session in SESSIONS}
    assert min(Counter(before.values()).values()) > 150
    after = {session: choose(engines[:2], session).name for session in SESSIONS}
    assert {s for s in SESSIONS if before[s] != after[s]} == {s for s in SESSIONS if before[s] == "inference-2"}


def test_affinity_never_overloads_an_engine() -> None:
    engines = fleet(0, 0, 0, 0)
    for _ in range(400):
        choose(engines, "one session for all").load += 1
    assert max(engine.load for engine in engines) == 125


def backend(name: str, version: str | None = "0.0", **facts: bool) -> Backend:
    known = version and PolicyVersion.parse(version)
    return Backend(name, f"http://{name}", version=known or None, **facts)


@pytest.mark.parametrize(("backends", "chosen"), [
    ([backend("a"), backend("b", None)], ["a"]),
    ([backend("a", "0.2"), backend("b", "0.10")], ["b"]),
    ([backend("a", "0.2"), backend("b", "0.10", draining=True)], ["a"]),
    ([backend("a", "0.2", paused=True), backend("b", "0.2")], ["b"]),
    ([backend("a", "0.2", paused=True), backend("b", "0.1")], ["a"]),
    ([backend("a", draining=True)], []),
])  # fmt: skip
def test_in_rotation_are_engines_of_the_newest_version(backends: list[Backend], chosen: list[str]) -> None:
    assert [b.name for b in in_rotation(backends)] == chosen


def test_a_silent_engine_is_probed_ever_more_rarely_until_it_answers() -> None:
    engine = backend("a")
    pauses = []
    for _ in range(7):
        engine.failed(now=100.0)
        pauses.append(engine.probe_at - 100.0)
    assert (pauses, engine.version) == ([1, 2, 4, 8, 16, 30, 30], None)
    engine.sent = 2
    engine.answered(state("0.3", running=5), now=200.0)
    assert (engine.failures, engine.probe_at, engine.load) == (0, 201.0, 5)
    assert engine.version == PolicyVersion(0, 3)


Engine = Callable[[httpx.Request], httpx.Response]


def route(engines: dict[str, Engine], ask: Callable[[httpx.AsyncClient, Pool], Awaitable[None]]) -> Pool:
    """Ask a router before `engines`, which are all in rotation at first; nothing is probed. Returns its pool."""

    async def run() -> Pool:
        upstream = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: engines[request.url.host](request)))
        pool = Pool(lambda: {}, upstream)
        pool.backends = {name: backend(name) for name in engines}
        app = httpx.ASGITransport(application(pool, upstream, "secret"))
        async with httpx.AsyncClient(transport=app, base_url="http://router", headers=TOKEN) as client:
            await ask(client, pool)
        return pool

    return asyncio.run(run())


def answers(request: httpx.Request) -> httpx.Response:
    said = f"{request.url.host} {request.url.raw_path.decode()} {request.content.decode()}"
    return httpx.Response(201, content=pieces(said), headers={"X-Kept": request.headers.get("x-given", "")})


async def pieces(text: str) -> AsyncIterator[bytes]:
    for letter in text:
        yield letter.encode()


def breaks(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_requests_and_answers_pass_unchanged() -> None:
    async def ask(client: httpx.AsyncClient, pool: Pool) -> None:
        reply = await client.post("/v1/completions?a=1", content=b"body", headers={"X-Given": "yes"})
        assert (reply.status_code, reply.text, reply.headers["x-kept"]) == (201, "a /v1/completions?a=1 body", "yes")
        assert await client.get("/metrics") and (await client.get("/health")).status_code == 200

    assert route({"a": answers}, ask).backends["a"].load == 0


def test_a_request_goes_to_another_engine_where_one_breaks() -> None:
    async def ask(client: httpx.AsyncClient, pool: Pool) -> None:
        for _ in range(2):
            assert (await client.post("/v1/completions")).text.startswith("b ")
        table = {row["name"]: row["in_rotation"] for row in (await client.get("/router/engines")).json()}
        assert table == {"a": False, "b": True}

    pool = route({"a": breaks, "b": answers}, ask)
    assert [(b.load, b.failures) for b in pool.backends.values()] == [(0, 1), (0, 0)]


def test_a_drained_engine_gets_no_requests_until_it_is_taken_back() -> None:
    async def ask(client: httpx.AsyncClient, pool: Pool) -> None:
        assert (await client.post("/router/drain", json={"engine": "a"})).status_code == 200
        assert {(await client.get("/v1/models", headers={"X-Session-ID": s})).text[0] for s in SESSIONS[:20]} == {"b"}
        await client.post("/router/drain", json={"engine": "a", "on": False})
        assert {(await client.get("/v1/models", headers={"X-Session-ID": s})).text[0] for s in SESSIONS[:20]} == {*"ab"}
        unknown = await client.post("/router/drain", json={"engine": "c"})
        assert (unknown.status_code, unknown.json()["error"]) == (400, "no engine 'c': expected one of a, b")

    route({"a": answers, "b": answers}, ask)


def test_it_says_when_no_engine_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "WAIT_S", 0.01)

    async def ask(client: httpx.AsyncClient, pool: Pool) -> None:
        reply = await client.post("/v1/completions")
        assert (reply.status_code, reply.json()["type"]) == (503, "InferenceFailure")
        assert (await client.get("/health")).status_code == 503

    route({"a": breaks}, ask)


def test_only_the_token_opens_it_and_single_engines_are_not_reached_through_it() -> None:
    async def ask(client: httpx.AsyncClient, pool: Pool) -> None:
        stranger = {"Authorization": "Bearer no"}
        assert (await client.get("/v1/models", headers=stranger)).status_code == 401
        assert (await client.post("/router/drain", headers=stranger, json={"engine": "a"})).status_code == 401
        assert (await client.post("/prime_hpc/load", json={})).status_code == 404

    route({"a": answers}, ask)
