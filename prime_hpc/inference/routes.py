"""The routes of an engine over those that its server has anyway: ours come first, and all need the run's token."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from prime_hpc.errors import PrimeHPCError
from prime_hpc.inference import protocol
from prime_hpc.inference.engine import PolicyEngine

Handler = Callable[[Request], Awaitable[Any]]
CLIENT_CLOSED_REQUEST = 499


class BearerToken:
    """Answers 401 to whoever does not hold the run's token."""

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] != "lifespan"
        if guarded and not protocol.allowed(scope["path"], Headers(scope=scope).get("authorization"), self._token):
            body = protocol.encode_error(PermissionError("this route needs the token of the run"))
            await json_response(body, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def application(policy: PolicyEngine, server: Starlette, token: str) -> ASGIApp:
    """The engine's ASGI application; what is not a route here goes to `server`, vLLM's own."""

    async def generate(request: Request) -> Any:
        body = msgspec.json.decode(await request.body(), type=protocol.GenerateRequest)
        session = request.headers.get(protocol.SESSION_HEADER, "")
        completion = await unless_disconnected(request, policy.generate(body, session))
        return completion and protocol.encode_completion(completion)

    async def stamps(request: Request) -> Any:
        return protocol.encode_stamps(policy.stamps.of(request.path_params["session"]))

    async def state(request: Request) -> Any:
        return policy.state()

    async def pause(request: Request) -> Any:
        return await policy.pause(msgspec.json.decode(await request.body() or b"{}", type=protocol.PauseRequest))

    async def prepare(request: Request) -> Any:
        return await policy.prepare(msgspec.json.decode(await request.body(), type=protocol.LoadRequest))

    async def load(request: Request) -> Any:
        return await policy.load(msgspec.json.decode(await request.body(), type=protocol.LoadRequest))

    async def resume(request: Request) -> Any:
        return await policy.resume()

    async def score(request: Request) -> Any:
        return await policy.score(msgspec.json.decode(await request.body(), type=protocol.ScoreRequest))

    async def checksums(request: Request) -> Any:
        return await policy.checksums()

    async def claim(request: Request) -> Any:
        policy.claims.take(msgspec.json.decode(await request.body(), type=protocol.ClaimRequest))
        return policy.state()

    handlers = {protocol.GENERATE: generate, protocol.PREPARE: prepare, protocol.PAUSE: pause, protocol.LOAD: load,
                protocol.RESUME: resume, protocol.SCORE: score, protocol.CLAIM: claim}  # fmt: skip
    routes = [Route(path, answering(handler), methods=["POST"]) for path, handler in handlers.items()]
    reading = {protocol.STAMPS: stamps, protocol.STATE: state, protocol.CHECKSUMS: checksums}
    routes += [Route(path, answering(handler)) for path, handler in reading.items()]
    # a router and no application around it, whose layers would each see every piece of a streamed answer once more
    router = Router([*routes, Mount("/", server)], lifespan=lambda _: server.router.lifespan_context(server))
    return BearerToken(router, token)


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, or None once the client has gone, which cancels it. The body must have been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answering(handler: Handler) -> Handler:
    """Wrap a handler that returns bytes of JSON, a struct, or None when nobody listens any more."""

    async def answer(request: Request) -> Response:
        try:
            result = await handler(request)
        except (ValueError, msgspec.MsgspecError, PrimeHPCError) as error:
            return json_response(protocol.encode_error(error), protocol.status_of(error))
        if result is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return json_response(result if isinstance(result, bytes) else msgspec.json.encode(result), 200)

    return answer


def json_response(body: bytes, status: int) -> Response:
    return Response(body, status, media_type="application/json")
