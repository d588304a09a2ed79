"""An engine whose replies are scripted: it reverses what the user said last, with log-probabilities known before."""

import asyncio
import threading
import zlib

import numpy as np
from aiohttp import web

from prime_hpc.models.tiny import ASSISTANT, EOS, SPECIAL_TOKENS, USER

MAX_MODEL_LEN = 64
USER_ID, ASSISTANT_ID, EOS_ID = (SPECIAL_TOKENS.index(token) for token in (USER, ASSISTANT, EOS))
FIRST_LETTER = len(SPECIAL_TOKENS)


def encode(text: str) -> list[int]:
    """Ids of a text of lower-case letters."""
    return [FIRST_LETTER + ord(c) - ord("a") for c in text]


def reply_to(text: str) -> list[int]:
    """The scripted reply: the text reversed, with its first letter in place of the last where it begins with a or b."""
    reply = encode(text[::-1])
    return [*(reply[:-1] if text[0] in "ab" else reply), EOS_ID]


def logprobs_of(ids: list[int]) -> list[float]:
    """Exact in float32."""
    return [-(i + 1) / 8 for i in range(len(ids))]


class ScriptedEngine:
    """Serves in a thread. The text `fail` is answered with 500, `unstamped` leaves no stamp; the first three tokens of
    any reply are of version 0.0, the others of 0.1."""

    def __init__(self, token: str):
        self._token = token
        self._stamps: dict[str, list[dict]] = {}
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self.salts: set[str] = set()
        self.sampling: list[dict] = []

    def __enter__(self) -> "ScriptedEngine":
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(middlewares=[self._authorize])
        app.add_routes([
            web.get("/v1/models", self._models),
            web.post("/inference/v1/generate", self._generate),
            web.get("/prime_hpc/stamps/{session}", self._stamps_of),
        ])  # fmt: skip
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _authorize(self, request: web.Request, handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self._token}":
            raise web.HTTPUnauthorized()
        return await handler(request)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": MAX_MODEL_LEN}]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.salts.add(body["cache_salt"])
        self.sampling.append(body["sampling_params"])
        text = _last_user_text(body["token_ids"])
        if text == "fail":
            return web.json_response({"error": "the engine has a bug"}, status=500)
        ids = reply_to(text)
        if text != "unstamped":
            spans = [["0.0", 0, min(3, len(ids))], ["0.1", 3, len(ids)]]
            crc = zlib.crc32(np.asarray(ids, dtype="<i4").tobytes())
            stamp = {"request_id": "r", "tokens": len(ids), "crc": crc, "spans": spans}
            self._stamps.setdefault(request.headers["X-Session-ID"], []).append(stamp)
        content = [{"token": f"token_id:{i}", "logprob": p} for i, p in zip(ids, logprobs_of(ids), strict=True)]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def _stamps_of(self, request: web.Request) -> web.Response:
        return web.json_response({"requests": self._stamps.get(request.match_info["session"], [])})


def _last_user_text(prompt: list[int]) -> str:
    begin = len(prompt) - prompt[::-1].index(USER_ID)
    end = prompt.index(ASSISTANT_ID, begin)
    return "".join(chr(i - FIRST_LETTER + ord("a")) for i in prompt[begin:end])
