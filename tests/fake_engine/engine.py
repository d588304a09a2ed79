"""A `TokenEngine` without a model: it samples from `Policy`, keeps the protocol, and fails when told to."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import numpy as np

from prime_hpc.errors import InferenceFailure
from prime_hpc.inference.engine import ROUTED_FROM, Piece
from prime_hpc.inference.protocol import GenerateRequest
from prime_hpc.inference.receive import answers_errors
from prime_hpc.inference.stamps import StampLog
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.stamps import Stamp
from tests.fake_engine.cache import Cache
from tests.fake_engine.images import show
from tests.fake_engine.policy import FakeOptions, Policy
from tests.fake_engine.weights import FakeWeights

FaultKind = Literal["error", "hang", "slow", "exit", "drop_stamps", "wrong_tensor", "hang_load", "out_of_memory"]
SLOW_S = 0.2
"""Extra seconds of every token of a slow request."""
EXIT_CODE = 9


class Fault(msgspec.Struct, kw_only=True):
    """The next `count` requests, or loads of weights, meet this fault."""

    kind: FaultKind
    count: int = 1


class Faults:
    """Faults that wait for a request."""

    def __init__(self, armed: dict[str, int]):
        self._armed = Counter(armed)

    def arm(self, fault: Fault) -> None:
        self._armed[fault.kind] += fault.count

    def strikes(self, kind: FaultKind) -> bool:
        """Whether this request meets the fault; uses it up."""
        struck = self._armed[kind] > 0
        self._armed[kind] -= struck
        return struck


class FakeEngine:
    """One worker, one token at a time. A reply depends on the seed, the prompt and how often that was asked before."""

    name = "fake"
    workers = 1
    failed = False

    def __init__(self, policy: Policy, options: FakeOptions, *, max_model_len: int, seed: int):
        self.max_model_len = max_model_len
        self.faults = Faults(options.faults)
        self.cache = Cache(options.kv_tokens)
        self._policy = policy
        self._weights = FakeWeights(policy.model)
        self._token_s = options.token_s
        self._routing = options.routing
        self._seed = seed
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._step = 0
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, request: GenerateRequest, request_id: str, salt: str) -> AsyncIterator[Piece]:
        if shown := show(request, self._policy.placeholder):
            request = msgspec.structs.replace(request, token_ids=shown.token_ids)
        limit = self._limit(request)
        token_s = await self._meet_faults()
        rng = self._generator(request.token_ids)
        reply = self._policy.reply(request.token_ids, self._step, rng)
        finish = "stop" if len(reply) <= limit else "length"
        async with self.cache.place(len(request.token_ids)) as place:
            for i, token in enumerate(reply[:limit], start=1):
                await asyncio.sleep(token_s)
                await self._running.wait()
                await self.cache.grow(place)
                last = i == min(limit, len(reply))
                experts = self._route(request, i, rng) if last and self._routing else None
                yield Piece([token], [-rng.expovariate(4.0) - 1e-3], finish if last else None, None, experts, shown)

    def score_prompt(self, prompt: list[int]) -> list[tuple[int, float]]:
        """Every token with a log-probability that depends on it and its place alone."""
        if self.faults.strikes("error"):
            raise InferenceFailure("a fault that was asked for")
        return [(token, -(1 + (token + place) % 8) / 8) for place, token in enumerate(prompt)]

    async def pause(self, *, recompute: bool) -> dict[str, int]:
        self._running.clear()
        return {}

    async def resume(self) -> None:
        self._running.set()

    async def score(self, token_ids: list[int], salt: str) -> list[float]:
        return await asyncio.to_thread(self._weights.score, token_ids)

    async def call_workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        if method in ("prime_hpc_load", "prime_hpc_receive"):
            if self.faults.strikes("hang_load"):
                await asyncio.Event().wait()
            if self.faults.strikes("out_of_memory"):
                return [{"error": "out of memory", "type": "OutOfMemoryError"}]
        answer = await asyncio.to_thread(answers_errors(getattr(self._weights, method)), *args)
        if method in ("prime_hpc_load", "prime_hpc_receive") and self.faults.strikes("wrong_tensor"):
            self._weights.spoil()
        return [answer]

    async def tell_version(self, version: str) -> None:
        self._step = PolicyVersion.parse(version).step

    def _route(self, request: GenerateRequest, sampled: int, rng: random.Random) -> np.ndarray:
        """Experts of every token that was computed, which the last one never is."""
        layers, experts, top_k = self._routing
        n = len(request.token_ids) - request.sampling_params.get(ROUTED_FROM, 0) + sampled - 1
        return np.array([[rng.sample(range(experts), top_k) for _ in range(layers)] for _ in range(n)])

    def _limit(self, request: GenerateRequest) -> int:
        """Most tokens of a reply.

        Raises:
            ValueError: the prompt is empty, too long or holds unknown tokens, or several completions are asked for.
        """
        prompt, sampling = request.token_ids, request.sampling_params
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1 or sampling.get("n", 1) != 1:
            raise ValueError(f"one completion of 1 to {self.max_model_len - 1} tokens, got {len(prompt)} tokens")
        if not all(0 <= token < self._policy.vocabulary for token in prompt):
            raise ValueError("a token id is out of vocabulary")
        return min(room, sampling.get("max_tokens") or room)

    async def _meet_faults(self) -> float:
        """Act out what this request meets; returns its seconds a token."""
        if self.faults.strikes("exit"):
            os._exit(EXIT_CODE)
        if self.faults.strikes("error"):
            raise InferenceFailure("a fault that was asked for")
        if self.faults.strikes("hang"):
            await asyncio.Event().wait()
        return self._token_s + SLOW_S * self.faults.strikes("slow")

    def _generator(self, prompt: list[int]) -> random.Random:
        key = tuple(prompt)
        self._asked[key] += 1
        return random.Random(f"{self._seed} {key} {self._asked[key]}")


def losing_stamps(faults: Faults) -> AbstractContextManager:
    """Within this context stamps are lost on demand."""
    keep = StampLog.add

    def add(log: StampLog, session: str, stamp: Stamp) -> None:
        if not faults.strikes("drop_stamps"):
            keep(log, session, stamp)

    return patch.object(StampLog, "add", add)
