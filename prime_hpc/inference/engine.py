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
from prime_hpc.cluster.files import list_fresh, read_json
from prime_hpc.errors import CorruptData, InferenceFailure, InfrastructureFailure, PrimeHPCError
from prime_hpc.inference.claims import Claims
from prime_hpc.inference.host_copy import HostCopy
from prime_hpc.inference.protocol import (
    ChecksumReply,
    Completion,
    EngineState,
    GenerateRequest,
    LoadReply,
    LoadRequest,
    PauseRequest,
    ScoreReply,
    ScoreRequest,
    ShownPrompt,
    WorkerAck,
)
from prime_hpc.inference.stamps import SpanTracker, StampLog
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.stamps import Span, Stamp, checksum
from prime_hpc.transport.weights import read_manifest

ROUTED_FROM = "routed_experts_prompt_start"
"""vLLM's parameter of a request: the first token of the prompt whose experts are wanted."""
UNFINISHED = (None, "abort", "error")
"""Ends of a request that say nothing about the policy."""
DRAIN_POLL_S = 0.01


class Piece(NamedTuple):
    """New tokens of a request, in order. The last piece has a `finish_reason`."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    weight_versions: list[Span] | None
    routed_experts: np.ndarray | None = None
    """With the last piece: experts of all tokens, prompt and reply, [n, layers, top_k]; see `Completion`."""
    prompt: ShownPrompt | None = None
    """The prompt as the model saw it, where it had images; the same with every piece."""


class TokenEngine(Protocol):
    """What samples tokens. `workers` counts the ranks that acknowledge weights; one that `failed` never recovers."""

    name: str
    max_model_len: int
    workers: int

    @property
    def failed(self) -> bool: ...

    def generate(self, request: GenerateRequest, request_id: str, salt: str) -> AsyncIterator[Piece]:
        """Tokens as they are sampled, or later and several at once; leaving the iterator early aborts the request.

        Raises:
            ValueError: the request cannot be served.
            InferenceFailure: the engine failed.
        """
        ...

    async def pause(self, *, recompute: bool) -> dict[str, int]:
        """Stop sampling and keep the requests.

        Returns how many tokens each request has, by its id, if some of them have not left `generate`.
        """
        ...

    async def resume(self) -> None: ...

    async def score(self, token_ids: list[int], salt: str) -> list[float]:
        """Log-probability of every token but the first, at temperature 1."""
        ...

    async def call_workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        """Call a method of `WeightReceiver` on every worker; an answer with `error` is a failure."""
        ...

    async def tell_version(self, version: str) -> None:
        """The version in force from now on."""
        ...


class PolicyEngine:
    """Serves one policy version at a time. While paused, new requests wait here and running ones in the engine."""

    def __init__(self, engine: TokenEngine, *, version: PolicyVersion, model: str, process: str, acks: Path,
                 stamps: StampLog, adapters: Sequence[str] = (), reach: Callable[[str], None] = lambda _: None,
                 host_copy: HostCopy | None = None, fingerprint: str = ""):  # fmt: skip
        self.stamps = stamps
        self.claims = Claims()
        self._fingerprint = fingerprint
        self._host_copy = host_copy
        self._reach = reach
        self.failure: InferenceFailure | None = None
        """Why this engine must not serve any more."""
        self._engine = engine
        self._version = str(version)
        self._models = (model, *adapters)
        self._process = process
        self._acks = acks
        self._paused = False
        self._pause_began = self._pause_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._update = asyncio.Lock()
        self._running = 0
        self._trackers: dict[str, SpanTracker] = {}
        self._prepared: tuple[LoadRequest, Path] | None = None
        self._broken: InferenceFailure | None = None

    async def start(self) -> None:
        await self._engine.tell_version(self._version)

    def state(self) -> EngineState:
        return EngineState(version=self._version, paused=self._paused, running=self._running, engine=self._engine.name,
                           max_model_len=self._engine.max_model_len, workers=self._engine.workers,
                           model=self._models[0], fingerprint=self._fingerprint, pause_s=self._pause_s)  # fmt: skip

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
            completion = await self._tracked(request, uuid.uuid4().hex)
        finally:
            self._running -= 1
        self.stamps.add(session, Stamp(request_id=completion.request_id, tokens=len(completion.token_ids),
                                       crc=checksum(completion.token_ids), spans=completion.spans))  # fmt: skip
        return completion

    async def _tracked(self, request: GenerateRequest, request_id: str) -> Completion:
        tracker = self._trackers[request_id] = SpanTracker()
        try:
            return await self._sample(request, request_id, tracker)
        finally:
            del self._trackers[request_id]

    async def _sample(self, request: GenerateRequest, request_id: str, tracker: SpanTracker) -> Completion:
        token_ids, logprobs, last = [], [], Piece([], [], None, None)
        # no version reuses the KV blocks of another, nor a run those of another run that lie on a disk of both
        salt = f"{self._acks}:{self._version}:{request.cache_salt or ''}"
        self._reach("sampling.before")
        # nothing else may be awaited in this loop: tokens that have left `generate` when a pause begins are of the
        # version that was in force till then
        async for piece in self._engine.generate(request, request_id, salt):
            token_ids += piece.token_ids
            logprobs += piece.logprobs
            tracker.reach(len(token_ids), self._version)
            self._reach("sampling.during")
            last = piece
        self._reach("sampling.after")
        if last.finish_reason in UNFINISHED:
            ended = f"the engine ended the request with {last.finish_reason!r} after {len(token_ids)} tokens"
            raise InferenceFailure(ended)
        return Completion(request_id=request_id, token_ids=token_ids, logprobs=logprobs,
                          finish_reason=last.finish_reason, spans=tracker.spans, weight_versions=last.weight_versions,
                          routed_experts=last.routed_experts, prompt=last.prompt,
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

    async def prepare(self, request: LoadRequest) -> EngineState:
        """Do of a load what leaves the model alone: fetch and check files, or connect with the trainer.

        Raises:
            ValueError: the version is not `lineage.step`.
            EngineInUse: another run uses this engine.
            CorruptData: files do not match their manifest, or the version is not on offer any more.
            InfrastructureFailure: the trainer does not answer.
        """
        async with self._update:
            await self._prepare(request)
        return self.state()

    async def load(self, request: LoadRequest) -> LoadReply:
        """Put `request.version` in force. An engine that is not paused is paused around it.

        Raises:
            ValueError: the version is not `lineage.step`.
            CorruptData: the directory does not match its manifest; the old version stays in force.
            InferenceFailure: the version was loaded in part. If its data are to blame, another load mends that; if the
                engine is, it does not go on.
        """
        async with self._update:
            paused_before = self._paused
            if not paused_before:
                await self._pause(PauseRequest())
            try:
                return await self._load(request)
            finally:
                if not paused_before and not (self.failure or self._broken):
                    await self._resume()

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Score a sequence under the version in force; no update begins meanwhile."""
        async with self._update:
            if self._paused:
                raise InferenceFailure("a paused engine scores nothing")
            logprobs = await self._engine.score(request.token_ids, f"{self._version}:{uuid.uuid4().hex}")
            return ScoreReply(version=self._version, logprobs=logprobs)

    async def checksums(self) -> ChecksumReply:
        """What lies in the workers' memory, by parameter."""
        async with self._update:
            answers = await self._engine.call_workers("prime_hpc_checksums")
            _raise_first(answers)
            return ChecksumReply(version=self._version, workers=[answer["checksums"] for answer in answers])

    async def _pause(self, request: PauseRequest) -> None:
        if not self._paused:
            self._pause_began = time.monotonic()
        self._paused = True
        self._open.clear()
        deadline = time.monotonic() + request.drain_s
        while request.kv == "drain" and self._trackers and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        sampled = await self._engine.pause(recompute=request.kv != "keep")
        for request_id, tracker in self._trackers.items():
            tracker.reach(sampled.get(request_id, 0), self._version)

    async def _resume(self) -> None:
        if self.failure or self._broken:
            raise self.failure or self._broken
        await self._engine.resume()
        if self._paused:
            self._pause_s = time.monotonic() - self._pause_began
        self._paused = False
        self._open.set()

    async def _prepare(self, request: LoadRequest) -> Path:
        """Returns the directory to load from."""
        PolicyVersion.parse(request.version)
        self.claims.check(request.holder)
        self._prepared = None
        self._reach("update.before")
        call, directory = self._engine.call_workers, Path(request.path)
        if request.link:
            whose = (self._process, request.link, str(self._engine.workers))
            _raise_first(await call("prime_hpc_join", request.path, request.version, *whose))
        else:
            if self._host_copy and read_manifest(directory).delta:
                directory = await asyncio.to_thread(self._host_copy.bring, directory)
            _raise_first(await call("prime_hpc_verify", str(directory), request.version))
        self._prepared = request, directory
        return directory

    async def _load(self, request: LoadRequest) -> LoadReply:
        begin = time.monotonic()
        prepared, directory = self._prepared or (None, Path())
        if prepared != request:
            directory = await self._prepare(request)
        self._prepared = None
        self._reach("update.during")
        workers = await self._load_workers(request, directory)
        await self._engine.tell_version(request.version)
        self._version, self._broken = request.version, None
        self._reach("update.after")
        return LoadReply(version=request.version, digest=workers[0].digest, seconds=time.monotonic() - begin,
                         workers=workers)  # fmt: skip

    async def _load_workers(self, request: LoadRequest, directory: Path) -> list[WorkerAck]:
        """Have every worker load, and read what they acknowledge."""
        call, acks = self._engine.call_workers, str(self._acks)
        try:
            if request.link:
                _raise_first(await call("prime_hpc_receive", request.version, acks, self._process))
            else:
                _raise_first(await call("prime_hpc_load", str(directory), acks, self._process))
            return self._acknowledgements(request.version)
        except InfrastructureFailure as error:
            self._broken = InferenceFailure(f"{request.version} came in part, load a whole version: {error}")
            raise self._broken from error
        except Exception as error:
            self.failure = InferenceFailure(f"{request.version} is loaded in part, restart this engine: {error}")
            raise self.failure from error

    def _acknowledgements(self, version: str) -> list[WorkerAck]:
        """What every rank wrote, in order of rank.

        Raises:
            CorruptData: a rank did not acknowledge this version, or loaded other data than the rest.
        """
        list_fresh(self._acks)  # ranks on other nodes write there too
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
