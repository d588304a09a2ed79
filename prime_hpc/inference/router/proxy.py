"""The router's ASGI application: hands requests on, and to the next engine where one breaks before it has answered."""

import time

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prime_hpc.errors import InferenceFailure
from prime_hpc.inference import protocol
from prime_hpc.inference.router.pool import Backend, Pool, in_rotation
from prime_hpc.inference.routes import CLIENT_CLOSED_REQUEST, BearerToken, answering, json_response, unless_disconnected

ENGINES = "/router/engines"
DRAIN = "/router/drain"
OWN = "/prime_hpc/"
"""Routes below this one concern a single engine."""
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host",
                        "content-length", "proxy-authorization", "proxy-connection"})  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]


class DrainRequest(msgspec.Struct, kw_only=True):
    """Send nothing more to `engine`; what it works on is finished. `on=false` takes that back."""

    engine: str
    on: bool = True


class Relay(StreamingResponse):
    """An engine's answer as it comes. However it ends, the engine is told, and no longer counts as busy with it."""

    def __init__(self, upstream: httpx.Response, backend: Backend):
        headers = {name: value for name, value in upstream.headers.items() if name not in HOP_BY_HOP}
        super().__init__(upstream.aiter_raw(), upstream.status_code, headers)
        self._upstream, self._backend = upstream, backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._backend.sent -= 1
            await self._upstream.aclose()


def application(pool: Pool, http: httpx.AsyncClient, token: str) -> Starlette:
    """Every route of an engine that does not concern that engine alone; and the engines, with a way to drain one."""

    async def health(request: Request) -> Response:
        return Response(status_code=200 if in_rotation(pool.backends.values()) else 503)

    async def metrics(request: Request) -> Response:
        lines = [f'prime_hpc_router_load{{engine="{b.name}"}} {b.load}' for b in pool.backends.values()]
        return PlainTextResponse("".join(f"{line}\n" for line in lines))

    async def engines(request: Request) -> Response:
        chosen = in_rotation(pool.backends.values())
        return JSONResponse([{"name": b.name, "url": b.base_url, "version": b.version and str(b.version),
                              "load": b.load, "draining": b.draining, "in_rotation": b in chosen}
                             for b in pool.backends.values()])  # fmt: skip

    async def drain(request: Request) -> bytes:
        asked = msgspec.json.decode(await request.body(), type=DrainRequest)
        pool.drain(asked.engine, asked.on)
        return msgspec.json.encode(asked)

    async def forward(request: Request) -> Response:
        if request.url.path.startswith(OWN):
            wrong = ValueError(f"ask an engine itself: {ENGINES} has its address")
            return json_response(protocol.encode_error(wrong), 404)
        await request.body()
        try:
            relay = await unless_disconnected(request, _send(request, pool, http))
        except InferenceFailure as error:
            return json_response(protocol.encode_error(error), 503)
        return relay or Response(status_code=CLIENT_CLOSED_REQUEST)

    own = [Route("/health", health), Route("/metrics", metrics), Route(ENGINES, engines),
           Route(DRAIN, answering(drain), methods=["POST"])]  # fmt: skip
    return Starlette(routes=[*own, Route("/{path:path}", forward, methods=METHODS)],
                     middleware=[Middleware(BearerToken, token=token)])  # fmt: skip


async def _send(request: Request, pool: Pool, http: httpx.AsyncClient) -> Relay:
    """The answer of the first engine that begins one.

    Raises:
        InferenceFailure: none does.
    """
    body, session = await request.body(), request.headers.get(protocol.SESSION_HEADER, "")
    headers = [(name, value) for name, value in request.headers.raw if name.decode().lower() not in HOP_BY_HOP]
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    tried: list[Backend] = []
    while True:
        backend = await pool.pick(session, tried)
        backend.sent += 1
        try:
            built = http.build_request(request.method, f"{backend.base_url}{target}", headers=headers, content=body)
            return Relay(await http.send(built, stream=True), backend)
        except httpx.TransportError:
            backend.sent -= 1
            backend.failed(time.monotonic())
            tried.append(backend)
        except BaseException:
            backend.sent -= 1
            raise
