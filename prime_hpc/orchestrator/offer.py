"""Requests at a set concurrency to servers of the OpenAI protocol, and what they took."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

from prime_hpc.errors import InferenceFailure

Route = Literal["completions", "generate"]
PATHS = {"completions": "/v1/completions", "generate": "/inference/v1/generate"}
DATA, DONE = b"data: ", b"[DONE]"
PERCENTILES = (50, 90, 99)
ANSWER_S = 900.0
"""A server that takes longer for an answer has failed."""


@dataclass(frozen=True)
class Target:
    """A server: root of its routes without `/v1`, name of the model, and key."""

    base_url: str
    model: str
    key: str | None = None


@dataclass(frozen=True)
class Shape:
    """What is asked: prompts of random tokens below `vocabulary`, the first `shared` of them the same in all, and
    replies of `reply` tokens, by a route: `completions` streams, `generate` is the token-in route of training."""

    prompt: int
    reply: int
    vocabulary: int
    shared: int = 0
    route: Route = "completions"


@dataclass(frozen=True)
class Timing:
    """One answer: sampled tokens, seconds until the first, None where they came together, and until the last."""

    tokens: int
    first_s: float | None
    whole_s: float


@dataclass(frozen=True)
class Level:
    """All answers at one concurrency, and seconds from the first question to the last answer."""

    concurrency: int
    timings: list[Timing]
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Sampled tokens and requests a second; percentiles of seconds until the first token, for each further token,
        and for the whole answer."""
        streamed = [t for t in self.timings if t.first_s is not None]
        return {
            "concurrency": self.concurrency,
            "requests": len(self.timings),
            "seconds": self.seconds,
            "tokens_per_s": sum(t.tokens for t in self.timings) / self.seconds,
            "requests_per_s": len(self.timings) / self.seconds,
            "first_token_s": percentiles([t.first_s for t in streamed]),
            "per_token_s": percentiles([(t.whole_s - t.first_s) / (t.tokens - 1) for t in streamed if t.tokens > 1]),
            "whole_s": percentiles([t.whole_s for t in self.timings]),
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """`p50`, `p90` and `p99`; None of nothing."""
    if not values:
        return None
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def prompts(shape: Shape, seed: int) -> Iterator[list[int]]:
    """Prompts without end, the same for the same seed; what they share depends on neither seed nor concurrency."""
    head = np.random.default_rng(0).integers(0, shape.vocabulary, shape.shared).tolist()
    rng = np.random.default_rng(seed)
    while True:
        yield head + rng.integers(0, shape.vocabulary, shape.prompt - shape.shared).tolist()


async def offer(targets: Sequence[Target], shape: Shape, *, concurrency: int, requests: int, seed: int) -> Level:
    """Ask `requests` times, `concurrency` at a time, the targets in turn.

    Raises:
        InferenceFailure: a server refused a request or failed.
    """
    questions = zip(range(requests), prompts(shape, seed), cycle(targets), strict=False)
    timings: list[Timing] = []

    async def ask_on() -> None:
        for _, prompt, target in questions:
            timings.append(await ask(http, target, shape, prompt))

    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(ANSWER_S)) as http:
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(ask_on())
        return Level(concurrency, timings, time.perf_counter() - begin)


async def ask(http: aiohttp.ClientSession, target: Target, shape: Shape, prompt: list[int]) -> Timing:
    """One question and its answer.

    Raises:
        InferenceFailure: the server refused it or failed.
    """
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    begin = time.perf_counter()
    try:
        async with http.post(target.base_url + PATHS[shape.route], json=question(target, shape, prompt),
                             headers=headers) as reply:  # fmt: skip
            if reply.status != 200:
                raise InferenceFailure(f"{reply.url} answered {reply.status}: {(await reply.text())[:500]}")
            if shape.route == "completions":
                return await _read_stream(reply, begin)
            answer = msgspec.json.decode(await reply.read())
            return Timing(len(answer["choices"][0]["token_ids"]), None, time.perf_counter() - begin)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise InferenceFailure(f"{target.base_url} did not answer: {type(error).__name__} {error}") from error


def question(target: Target, shape: Shape, prompt: list[int]) -> dict[str, Any]:
    """The body of a request for exactly `shape.reply` tokens."""
    sampling = {"max_tokens": shape.reply, "ignore_eos": True, "temperature": 1.0}
    if shape.route == "generate":
        # training needs the log-probability of each token, which a server that is not of a run gives if asked
        return {"model": target.model, "token_ids": prompt, "sampling_params": {**sampling, "logprobs": 0}}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": target.model, "prompt": prompt, **stream, **sampling}


async def _read_stream(reply: aiohttp.ClientResponse, begin: float) -> Timing:
    """Server-sent events: a chunk for each token or more, then one with the usage."""
    first, tokens = None, 0
    async for line in reply.content:
        if not line.startswith(DATA) or line.startswith(DATA + DONE):
            continue
        event = msgspec.json.decode(line[len(DATA) :])
        if "error" in event:
            raise InferenceFailure(f"{reply.url} broke off: {event['error']}")
        if event.get("choices") and first is None:
            first = time.perf_counter() - begin
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return Timing(tokens, first, time.perf_counter() - begin)
