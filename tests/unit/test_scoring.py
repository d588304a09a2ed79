"""Scores of samples under a reference, asked of an endpoint that answers as vLLM does."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from aiohttp import web

from prime_hpc.config.algorithm import OPSD
from prime_hpc.envs import scoring
from prime_hpc.envs.scoring import Hints, Scorer
from prime_hpc.errors import EnvironmentFailure, InferenceFailure
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Endpoint, ImageSpan, Sample


class Reference:
    """Scores a token by its place: 0 for the first, then -1, -2, ...; refuses and fails on demand."""

    def __init__(self, failures: int = 0):
        self.failures = failures
        self.asked: list[tuple[str, dict]] = []

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.headers["Authorization"], body))
        if len(body["prompt"]) > 6:
            return web.json_response({"error": "too long"}, status=400)
        if self.failures:
            self.failures -= 1
            return web.json_response({"error": "busy"}, status=503)
        entries = [None, *({str(t): {"logprob": -float(i)}} for i, t in enumerate(body["prompt"][1:], 1))]
        return web.json_response({"choices": [{"prompt_logprobs": entries}]})


def sample(*token_ids: int) -> Sample:
    empty = np.zeros(len(token_ids))
    return Sample(sample_id="a", source="words", token_ids=Array.of(token_ids, "i4"), mask=Array.of(empty, "bool"),
                  logprobs=Array.of(empty, "f4"), versions=Array.of(empty, "i8"))  # fmt: skip


def add(reference: Reference, samples: list[Sample], hint: list[int], **endpoint: str) -> None:
    async def scenario() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", reference.complete)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with Scorer("run") as scorer:
                await scorer.add(samples, Endpoint(base_url=url, model="big", **endpoint), hint, "0.1")
        finally:
            await runner.cleanup()

    asyncio.run(scenario())


def test_samples_with_images_are_not_scored() -> None:
    seen = msgspec.structs.replace(sample(5, 6), images=[ImageSpan(0, 1, "d")])
    reference = Reference()
    with pytest.raises(EnvironmentFailure, match="the policy was shown an image"):
        add(reference, [sample(5), seen], [])
    assert reference.asked == []


def test_every_token_is_scored_behind_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", "secret")
    monkeypatch.setattr(scoring, "RETRY_PAUSE_S", 0)
    reference, samples = Reference(failures=2), [sample(5, 6, 7)]
    add(reference, samples, [], key_variable="FAR_KEY")
    assert samples[0].ref_logprobs.numpy().tolist() == [0, -1, -2]
    (key, body), *_ = reference.asked
    assert key == "Bearer secret" and len(reference.asked) == 3, "two failures are tried again"
    assert (body["model"], body["prompt"], body["max_tokens"], body["cache_salt"]) == ("big", [5, 6, 7], 1, "0.1")
    samples = [sample(5, 6), sample(7)]
    add(reference, samples, [8, 9])
    assert [s.ref_logprobs.numpy().tolist() for s in samples] == [[-2, -3], [-2]]
    assert reference.asked[-1][0] == "Bearer run"


def test_a_reference_that_fails_or_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "RETRY_PAUSE_S", 0)
    with pytest.raises(InferenceFailure, match="no scores from .*503"):
        add(Reference(failures=3), [sample(5)], [])
    with pytest.raises(EnvironmentFailure, match="refused 7 tokens: .*larger max_model_len"):
        add(Reference(), [sample(1, 2, 3, 4)], [8, 9, 9])


def test_a_hint_is_the_demonstration_in_its_template() -> None:
    hints = Hints(OPSD(demonstration="answer", template="So: {demonstration}!"), lambda role, text: [role, text])
    trace = SimpleNamespace(info={}, task=SimpleNamespace(data=SimpleNamespace(answer="cba")))
    assert hints.of(trace) == ["system", "So: cba!"]
    trace.info["answer"] = "abc"
    assert hints.of(trace) == ["system", "So: abc!"]
    with pytest.raises(EnvironmentFailure, match="no 'answer'"):
        hints.of(SimpleNamespace(info={}, task=SimpleNamespace(data=SimpleNamespace())))
