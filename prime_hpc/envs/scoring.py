"""Log-probabilities of an episode's samples under a reference: a frozen model, or the policy with a hint before it."""

import asyncio
import os
from collections.abc import Callable

import aiohttp
import msgspec
import numpy as np
import verifiers.v1 as vf

from prime_hpc.config.algorithm import OPSD
from prime_hpc.config.renderer import renderer_config
from prime_hpc.config.sections import ModelConfig
from prime_hpc.errors import EnvironmentFailure, InferenceFailure
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import Endpoint, Sample

TRIES = 3
TIMEOUT_S = 120.0
"""Of one request; the worker's answer is due soon after the episode's limit."""
RETRY_PAUSE_S = 1.0
REFUSED = 400

Encode = Callable[[str, str], list[int]]
"""Tokens of one message from its role and text."""


class _Entry(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Entry] | None]


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class Scorer:
    """Asks vLLM's completions route; an async context manager. `token` is the run's, for engines of the run."""

    def __init__(self, token: str):
        self._token = token

    async def __aenter__(self) -> "Scorer":
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def add(self, samples: list[Sample], endpoint: Endpoint, hint: list[int], salt: str) -> None:
        """Give every sample its `ref_logprobs`, as if the tokens of `hint` stood before it.

        Raises:
            EnvironmentFailure: a sample shows an image, or with its hint is longer than the reference takes.
            InferenceFailure: the reference does not answer.
        """
        if any(sample.images for sample in samples):
            raise EnvironmentFailure("a reference scores tokens alone, and the policy was shown an image: train this "
                                     "source with an algorithm and a loss that need no reference")  # fmt: skip
        scores = await asyncio.gather(*(
            self.score(endpoint, [*hint, *sample.token_ids.numpy().tolist()], salt) for sample in samples
        ))  # fmt: skip
        for sample, logprobs in zip(samples, scores, strict=True):
            sample.ref_logprobs = Array.of(logprobs[len(hint) :], "f4")

    async def score(self, endpoint: Endpoint, token_ids: list[int], salt: str) -> np.ndarray:
        """f4[n]: log-probability of each token given those before it, at temperature 1; 0 for the first."""
        body = {"model": endpoint.model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0,
                "prompt_logprobs": 0, "cache_salt": salt}  # fmt: skip
        for attempt in range(TRIES):
            try:
                entries = await self._ask(endpoint, body)
                break
            except InferenceFailure:
                if attempt == TRIES - 1:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)
        if len(entries) != len(token_ids):
            raise InferenceFailure(f"{endpoint.base_url} scored {len(entries)} of {len(token_ids)} tokens")
        scores = [entry[str(token)].logprob if entry else 0.0
                  for entry, token in zip(entries, token_ids, strict=True)]  # fmt: skip
        return np.array(scores, dtype=np.float32)

    async def _ask(self, endpoint: Endpoint, body: dict) -> list[dict[str, _Entry] | None]:
        key = os.environ.get(endpoint.key_variable, "") if endpoint.key_variable else self._token
        url = f"{endpoint.base_url}/v1/completions"
        try:
            async with self._http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
                data = await reply.read()
                if reply.status == REFUSED:
                    raise EnvironmentFailure(f"{url} refused {len(body['prompt'])} tokens: {data.decode()[:500]}; "
                                             "give it a larger max_model_len")  # fmt: skip
                reply.raise_for_status()
                return msgspec.json.decode(data, type=_Reply).choices[0].prompt_logprobs
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, IndexError) as error:
            raise InferenceFailure(f"no scores from {url}: {type(error).__name__}: {error}") from error


class Hints:
    """What the policy, as its own teacher, sees before a conversation (SDFT; arXiv 2601.19897)."""

    def __init__(self, algorithm: OPSD, encode: Encode):
        self._algorithm, self._encode = algorithm, encode

    def of(self, trace: vf.Trace) -> list[int]:
        """Tokens of the hint for the task of `trace`.

        Raises:
            EnvironmentFailure: the task has no demonstration.
        """
        name = self._algorithm.demonstration
        text = trace.info.get(name) or getattr(trace.task.data, name, None)
        if not text:
            raise EnvironmentFailure(f"the task has no {name!r} in its data, nor the trace in its info: "
                                     "name another field as algorithm.demonstration")  # fmt: skip
        message = self._algorithm.template.replace("{demonstration}", str(text))
        return self._encode(self._algorithm.role, message)


def make_encoder(model: ModelConfig) -> Encode:
    """Tokens as the policy's own renderer makes them."""
    from renderers import create_renderer
    from renderers.base import load_tokenizer

    renderer = create_renderer(load_tokenizer(model.tokenizer or model.path), renderer_config(model))
    return lambda role, text: renderer.render_ids([{"role": role, "content": text}])
