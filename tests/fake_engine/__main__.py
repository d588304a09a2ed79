"""An engine that speaks the protocol of the real one, without a model: starts in a second and fails on demand."""

import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from prime_hpc.cluster.role import Role, main
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.inference import server
from prime_hpc.inference.protocol import GenerateRequest
from prime_hpc.inference.routes import answering
from prime_hpc.inference.served import served
from tests.fake_engine.engine import FakeEngine, Fault, losing_stamps
from tests.fake_engine.policy import FakeOptions, Policy

VERSION = "0"


def run(role: Role) -> None:
    """Serve until SIGTERM.

    Raises:
        ConfigurationError: `inference.engine_args` has an option that the fake engine does not know.
    """
    given = served(role).engine_args
    try:
        options = msgspec.convert(given, FakeOptions)
    except msgspec.ValidationError as error:
        problem = ConfigProblem("inference.engine_args", given, f"options of FakeOptions ({error})")
        raise ConfigurationError([problem]) from error
    server.run(role, functools.partial(start, role, options))


@asynccontextmanager
async def start(role: Role, options: FakeOptions) -> AsyncIterator[tuple[FakeEngine, Starlette]]:
    """The engine and the routes that vLLM would bring."""
    if role.config.update.streams:
        import torch  # noqa: F401  the first stream must not wait for it
    model = served(role)
    policy = Policy(Path(model.tokenizer), options)
    seed = role.config.seed + role.process.index
    engine = FakeEngine(policy, options, max_model_len=model.max_tokens, seed=seed)
    with losing_stamps(engine.faults):
        yield engine, application(engine, model.name)


def application(engine: FakeEngine, model: str) -> Starlette:
    """Health, version, metrics, models, a chat, completions and scores of a prompt, and `POST /fake/fault`."""

    async def health(request: Request) -> PlainTextResponse:
        return PlainTextResponse("")

    async def version(request: Request) -> JSONResponse:
        return JSONResponse({"version": VERSION})

    async def models(request: Request) -> JSONResponse:
        card = {"id": model, "object": "model", "max_model_len": engine.max_model_len}
        return JSONResponse({"object": "list", "data": [card]})

    async def complete(request: Request) -> Response:
        """A stream of tokens, or a prompt's log-probabilities, as vLLM gives them."""
        body = msgspec.json.decode(await request.body())
        if body.get("stream"):
            return StreamingResponse(events(body), media_type="text/event-stream")
        return await answering(score)(request)

    async def events(body: dict[str, Any]) -> AsyncIterator[bytes]:
        asked = GenerateRequest(token_ids=body["prompt"], sampling_params={"max_tokens": body["max_tokens"]})
        tokens = 0
        async for piece in engine.generate(asked, "", ""):
            tokens += len(piece.token_ids)
            yield b"data: " + msgspec.json.encode({"choices": [{"text": "a"}]}) + b"\n\n"
        yield b"data: " + msgspec.json.encode({"choices": [], "usage": {"completion_tokens": tokens}}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def chat(request: Request) -> StreamingResponse:
        """The last message reversed, a letter at a time."""
        said = msgspec.json.decode(await request.body())["messages"][-1]["content"]
        events = [json.dumps({"choices": [{"delta": {"content": letter}}]}) for letter in said[::-1]]
        return StreamingResponse(
            (f"data: {event}\n\n" for event in [*events, "[DONE]"]), media_type="text/event-stream"
        )

    async def score(request: Request) -> bytes:
        prompt = msgspec.json.decode(await request.body())["prompt"]
        if len(prompt) >= engine.max_model_len:
            raise ValueError(f"{len(prompt)} tokens leave no room for one more")
        entries = [None, *({str(token): {"logprob": logprob}} for token, logprob in engine.score_prompt(prompt)[1:])]
        return msgspec.json.encode({"choices": [{"prompt_logprobs": entries}]})

    async def fault(request: Request) -> Fault:
        asked = msgspec.json.decode(await request.body(), type=Fault)
        engine.faults.arm(asked)
        return asked

    async def metrics(request: Request) -> PlainTextResponse:
        return PlainTextResponse(engine.cache.tell())

    plain = {"/health": health, "/metrics": metrics, "/version": version, "/v1/models": models}
    return Starlette(routes=[*(Route(path, handler) for path, handler in plain.items()),
                             Route("/v1/chat/completions", chat, methods=["POST"]),
                             Route("/v1/completions", complete, methods=["POST"]),
                             Route("/fake/fault", answering(fault), methods=["POST"])])  # fmt: skip


if __name__ == "__main__":
    main(run, server=True)
