"""The policy behind the routes: requests that survive weight updates, and one version in force at a time."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from prime_hpc import errors
from prime_hpc.cluster.files import read_json
from prime_hpc.errors import CorruptData, InferenceFailure, PrimeHPCError
from prime_hpc.inference.protocol import (
    Completion,
    EngineState,
    GenerateRequest,
    LoadReply,
    LoadRequest,
    PauseRequest,
    WorkerAck,
)
from prime_hpc.inference.stamps import SpanTracker, StampLog
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.stamps import Span, Stamp, checksum

ROUTED_FROM = "routed_experts_prompt_start"
"""vLLM's parameter of a request: the first token of the prompt whose experts are wanted."""
UNFINISHED = (None, "abort", "error")
"""Ends of a request that say nothing about the policy."""


class Piece(NamedTuple):
    """New tokens of a request, in order. The last piece has a `finish_reason`."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    weight_versions: list[Span] | None
    routed_experts: np.ndarray | None = None
    """With the last piece: experts of all tokens, prompt and reply, [n, layers, top_k]; see `Completion`."""


class TokenEngine(Protocol):
    """What samples tokens. `workers` counts the ranks that acknowledge weights; one that `failed` never recovers."""

    name: str
    max_model_len: int
    workers: int

    @property
    def failed(self) -> bool: ...

    def generate(self, request: GenerateRequest, request_id: str, salt: str) -> AsyncIterator[Piece]:
        """Tokens as they are sampled; leaving the iterator early aborts the request.

        Raises:
            ValueError: the request cannot be served.
            InferenceFailure: the engine failed.
        """
        ...

    async def pause(self, *, recompute: bool) -> None:
        """Stop sampling and keep the requests. On return every token sampled so far has left `generate`."""
        ...

    async def resume(self) -> None: ...

    async def call_workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        """Call `prime_hpc_verify` or `prime_hpc_load` on every worker; an answer with `error` is a failure."""
        ...

    async def tell_version(self, version: str) -> None:
        """The version in force from now on."""
        ...


class PolicyEngine:
    """Serves one policy version at a time. While paused, new requests wait here and running ones in the engine."""

    def __init__(self, engine: TokenEngine, *, version: PolicyVersion, model: str, process: str, acks: Path,
                 stamps: StampLog, adapters: Sequence[str] = (),
                 reach: Callable[[str], None] = lambda _: None):  # fmt: skip
        self.stamps = stamps
        self._reach = reach
        self.failure: InferenceFailure | None = None
        """Why this engine must not serve any more."""
        self._engine = engine
        self._version = str(version)
        self._models = (model, *adapters)
        self._process = process
        self._acks = acks
        self._paused = False
        self._open = asyncio.Event()
        self._open.set()
        self._update = asyncio.Lock()
        self._running = 0

    async def start(self) -> None:
        await self._engine.tell_version(self._version)

    def state(self) -> EngineState:
        return EngineState(version=self._version, paused=self._paused, running=self._running, engine=self._engine.name,
                           max_model_len=self._engine.max_model_len, workers=self._engine.workers)  # fmt: skip

    async def generate(self, request: GenerateRequest, session: str) -> Completion:
        """Sample one completion and remember its stamp under `session`.

        Raises:
            ValueError: the request is not one that this engine can serve.
            InferenceFailure: the engine gave up the request.
        """
        if request.model not in (None, *self._models):
            served = ", ".join(map(repr, self._models))
            raise ValueError(f"model {request.model!r} is not served here: expected one of {served}")
        self._running += 1
        try:
            await self._open.wait()
            completion = await self._sample(request, uuid.uuid4().hex)
        finally:
            self._running -= 1
        self.stamps.add(session, Stamp(request_id=completion.request_id, tokens=len(completion.token_ids),
                                       crc=checksum(completion.token_ids), spans=completion.spans))  # fmt: skip
        return completion

    async def _sample(self, request: GenerateRequest, request_id: str) -> Completion:
        tracker, token_ids, logprobs, finish, theirs, experts = SpanTracker(), [], [], None, None, None
        salt = f"{self._version}:{request.cache_salt or ''}"  # no version reuses the KV blocks of another
        self._reach("sampling.before")
        # nothing else may be awaited in this loop: `TokenEngine.pause` promises that tokens have been stamped
        async for piece in self._engine.generate(request, request_id, salt):
            tracker.add(len(piece.token_ids), self._version)
            self._reach("sampling.during")
            token_ids += piece.token_ids
            logprobs += piece.logprobs
            finish, theirs, experts = piece.finish_reason, piece.weight_versions, piece.routed_experts
        self._reach("sampling.after")
        if finish in UNFINISHED:
            raise InferenceFailure(f"the engine ended the request with {finish!r} after {len(token_ids)} tokens")
        return Completion(request_id=request_id, token_ids=token_ids, logprobs=logprobs, finish_reason=finish,
                          spans=tracker.spans, weight_versions=theirs, routed_experts=experts,
                          routed_from=request.sampling_params.get(ROUTED_FROM, 0))  # fmt: skip

    async def pause(self, request: PauseRequest) -> EngineState:
        """Stop sampling. Requests stay; with `recompute` their KV cache does not."""
        async with self._update:
            await self._pause(request)
        return self.state()

    async def resume(self) -> EngineState:
        async with self._update:
            await self._resume()
        return self.state()

    async def load(self, request: LoadRequest) -> LoadReply:
        """Put `request.version` in force. An engine that is not paused is paused around it.

        Raises:
            ValueError: the version is not `lineage.step`.
            CorruptData: the directory does not match its manifest; the old version stays in force.
            InferenceFailure: a worker failed while it loaded; the engine cannot go on.
        """
        PolicyVersion.parse(request.version)
        async with self._update:
            paused_before = self._paused
            if not paused_before:
                await self._pause(PauseRequest())
            try:
                return await self._load(request)
            finally:
                if not paused_before and self.failure is None:
                    await self._resume()

    async def _pause(self, request: PauseRequest) -> None:
        self._paused = True
        self._open.clear()
        await self._engine.pause(recompute=request.kv == "recompute")

    async def _resume(self) -> None:
        if self.failure:
            raise self.failure
        await self._engine.resume()
        self._paused = False
        self._open.set()

    async def _load(self, request: LoadRequest) -> LoadReply:
        begin = time.monotonic()
        call = self._engine.call_workers
        self._reach("update.before")
        _raise_first(await call("prime_hpc_verify", request.path, request.version))
        self._reach("update.during")
        try:
            _raise_first(await call("prime_hpc_load", request.path, str(self._acks), self._process))
            workers = self._acknowledgements(request.version)
        except Exception as error:
            self.failure = InferenceFailure(f"{request.version} is loaded in part, restart this engine: {error}")
            raise self.failure from error
        await self._engine.tell_version(request.version)
        self._version = request.version
        self._reach("update.after")
        return LoadReply(version=request.version, digest=workers[0].digest, seconds=time.monotonic() - begin,
                         workers=workers)  # fmt: skip

    def _acknowledgements(self, version: str) -> list[WorkerAck]:
        """What every rank wrote, in order of rank.

        Raises:
            CorruptData: a rank did not acknowledge this version, or loaded other data than the rest.
        """
        paths = [self._acks / f"{self._process}.rank{rank}.json" for rank in range(self._engine.workers)]
        records = [read_json(path) for path in paths]
        late = [rank for rank, record in enumerate(records) if not record or record["version"] != version]
        if late:
            raise CorruptData(f"ranks {late} of {len(paths)} did not acknowledge {version}")
        acks = [msgspec.convert(record, WorkerAck) for record in records]
        if len({ack.digest for ack in acks}) > 1:
            raise CorruptData(f"ranks loaded different data as {version}")
        return acks


def _raise_first(answers: list[dict[str, Any]]) -> None:
    """Raise the first error among workers' answers, by its own type where it is one of this product's."""
    for answer in answers:
        if "error" in answer:
            kind = getattr(errors, answer["type"], InferenceFailure)
            typed = isinstance(kind, type) and issubclass(kind, PrimeHPCError)
            raise (kind if typed else InferenceFailure)(answer["error"])
