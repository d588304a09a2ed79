"""The HTTP protocol of an engine: messages, routes, and who may call. Free of torch and vLLM, so any engine speaks it.

Every route but `OPEN_ROUTES` needs `Authorization: Bearer <token of the run>`.
"""

import hmac
from typing import Any, Literal

import msgspec
import numpy as np

from prime_hpc.errors import CorruptData, EngineInUse
from prime_hpc.transport.stamps import Span, Stamp

GENERATE = "/inference/v1/generate"
STAMPS = "/prime_hpc/stamps/{session}"
STATE = "/prime_hpc/state"
PREPARE = "/prime_hpc/prepare"
PAUSE = "/prime_hpc/pause"
LOAD = "/prime_hpc/load"
RESUME = "/prime_hpc/resume"
SCORE = "/prime_hpc/score"
CHECKSUMS = "/prime_hpc/checksums"
CLAIM = "/prime_hpc/claim"
OPEN_ROUTES = frozenset({"/health", "/metrics", "/version"})
SESSION_HEADER = "X-Session-ID"


class ImagePart(msgspec.Struct, kw_only=True):
    """An image of a prompt, as a data URI."""

    type: Literal["image_url"]
    url: str


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Token ids in. `sampling_params` go by vLLM's names; the sampled token's log-probability is always returned.

    `content_parts` are the images of the prompt, in the order of the tokens that stand for them: one for each, in whose
    place the engine puts as many as the image takes.
    """

    token_ids: list[int]
    content_parts: list[ImagePart] = []
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    cache_salt: str | None = None
    priority: int = 0


class ShownPrompt(msgspec.Struct, kw_only=True):
    """A prompt with images as the model saw it: its tokens, and start and length of those of each image."""

    token_ids: list[int]
    images: list[tuple[int, int]]


class Completion(msgspec.Struct, kw_only=True):
    """Token ids out, with the log-probability of each and the spans of policy versions that sampled them.

    `weight_versions` are the engine's own spans, where it keeps any. `routed_experts` are the experts of every token,
    prompt and reply, from token `routed_from` on: [n, layers, top_k], the last token left out by some engines.
    `prompt` is there if it had images.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    spans: list[Span]
    weight_versions: list[Span] | None = None
    routed_experts: np.ndarray | None = None
    routed_from: int = 0
    prompt: ShownPrompt | None = None


class PauseRequest(msgspec.Struct, kw_only=True):
    """`recompute` drops the KV cache, so that tokens after the pause depend on the weights of then alone. `drain` lets
    running requests end first, for `drain_s` seconds; what runs on after that is kept, as with `recompute`."""

    kv: Literal["recompute", "keep", "drain"] = "recompute"
    drain_s: float = 0.0


class LoadRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Serve the weights that `path`, a version directory, leads to, as `version`; by `link`, where they are streamed.

    Asked of the prepare route, everything happens that can be done while requests run. `holder` is who asks, where
    engines are claimed.
    """

    version: str
    path: str
    link: str | None = None
    holder: str = ""


class ClaimRequest(msgspec.Struct, kw_only=True):
    """`holder`, a run, uses this engine for `seconds` from now; `exclusive` to change its weights. 0 gives it back."""

    holder: str
    seconds: float
    exclusive: bool = False


class ScoreRequest(msgspec.Struct, kw_only=True):
    """A sequence to score under the version in force."""

    token_ids: list[int]


class ScoreReply(msgspec.Struct, kw_only=True):
    """Log-probability of every token but the first, at temperature 1."""

    version: str
    logprobs: list[float]


class WorkerAck(msgspec.Struct, kw_only=True):
    """One worker rank serves `version`. `digest` is that of the files or of the streamed tensors, `time` seconds since
    the epoch."""

    version: str
    digest: str
    seconds: float
    n_tensors: int
    time: float


class LoadReply(msgspec.Struct, kw_only=True):
    """All workers serve `version`."""

    version: str
    digest: str
    seconds: float
    workers: list[WorkerAck]


class EngineState(msgspec.Struct, kw_only=True):
    """What an engine is doing; `running` counts requests that are not answered yet, which stood still for `pause_s`
    seconds in the newest pause that is over. `fingerprint` tells which model it was started from."""

    version: str
    paused: bool
    running: int
    engine: str
    max_model_len: int
    workers: int
    model: str = ""
    fingerprint: str = ""
    pause_s: float = 0.0


class ChecksumReply(msgspec.Struct, kw_only=True):
    """Checksum of each parameter as it lies in the memory of each worker rank."""

    version: str
    workers: list[dict[str, str]]


def allowed(path: str, authorization: str | None, token: str) -> bool:
    """Whether a request with this `Authorization` header may use `path`."""
    return path in OPEN_ROUTES or hmac.compare_digest(authorization or "", f"Bearer {token}")


def encode_completion(completion: Completion) -> bytes:
    """The answer as `renderers` reads it; floats keep full precision."""
    content = [{"token": f"token_id:{t}", "logprob": p}
               for t, p in zip(completion.token_ids, completion.logprobs, strict=True)]  # fmt: skip
    choice = {"index": 0, "token_ids": completion.token_ids, "finish_reason": completion.finish_reason,
              "logprobs": {"content": content}}  # fmt: skip
    if completion.weight_versions is not None:
        choice["weight_versions"] = completion.weight_versions
    if completion.routed_experts is not None:
        choice["routed_experts"] = _encode_experts(completion.routed_experts, completion.routed_from)
    answer = {"request_id": completion.request_id, "choices": [choice]}
    if completion.prompt:
        answer["prompt_token_ids"] = completion.prompt.token_ids
        answer["mm_placeholders"] = {"image": [{"offset": start, "length": n} for start, n in completion.prompt.images]}
    return msgspec.json.encode(answer)


def _encode_experts(experts: np.ndarray, start: int) -> dict[str, Any]:
    """`data` comes first, as `renderers` looks for it in the bytes of the answer."""
    narrow = experts.astype("u1" if experts.max(initial=0) < 256 else "<u2")
    return {"data": narrow.tobytes(), "shape": list(experts.shape), "start": start, "dtype": narrow.dtype.name}


def encode_stamps(stamps: list[Stamp]) -> bytes:
    """The answer of the stamps route."""
    return msgspec.json.encode({"requests": stamps})


def encode_error(error: Exception) -> bytes:
    """The body of every answer that is not 200; of an engine in use, by whom and for how many seconds at least."""
    claim = {"holder": error.holder, "seconds": error.seconds} if isinstance(error, EngineInUse) else {}
    return msgspec.json.encode({"error": str(error), "type": type(error).__name__, **claim})


def status_of(error: Exception) -> int:
    """HTTP status of an error: 400 for a bad request, 409 for an engine that another run uses, 422 for corrupt weights,
    500 for the rest."""
    if isinstance(error, EngineInUse):
        return 409
    if isinstance(error, CorruptData):
        return 422
    return 400 if isinstance(error, ValueError | msgspec.MsgspecError) else 500
