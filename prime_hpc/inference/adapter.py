"""vLLM as a `TokenEngine`, and everything that differs between the releases in use: 0.25 (CUDA) and 0.32 (CPU)."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

from fastapi import FastAPI
from vllm import exceptions as vllm_exceptions
from vllm.engine.protocol import EngineClient
from vllm.inputs import TokensPrompt, tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_ip
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.version import __version__

from prime_hpc.errors import InferenceFailure
from prime_hpc.inference.engine import Piece
from prime_hpc.inference.protocol import GenerateRequest, ShownPrompt
from prime_hpc.transport.images import decode, from_data_uri
from prime_hpc.transport.stamps import Span

if find_spec("vllm.entrypoints.launchers"):
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
else:
    from vllm.entrypoints.openai.api_server import build_app, build_async_engine_client, init_app_state
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args

__all__ = ["FlexibleArgumentParser", "VllmEngine", "get_ip", "make_arg_parser", "run_headless", "start",
           "validate_parsed_serve_args"]  # fmt: skip

Refusal = getattr(vllm_exceptions, "VLLMClientError", ValueError)
"""What vLLM raises for a request that it will not serve."""


class VllmEngine:
    """A `TokenEngine` over vLLM's engine client."""

    name = f"vllm {__version__}"

    def __init__(self, client: EngineClient, adapters: Sequence[str]):
        self._client = client
        # every adapter is loaded before it is asked for, so that a path is never read from here
        self._adapters = {name: LoRARequest(name, number, lora_path=name) for number, name in enumerate(adapters, 1)}
        self._outputs = client.engine_core.outputs_queue
        self._receive = client.engine_core.get_output_async
        self._idle = asyncio.Event()
        self._idle.set()
        client.engine_core.get_output_async = self._receive_noting_idleness
        config = client.vllm_config
        self.max_model_len: int = config.model_config.max_model_len
        self.workers: int = config.parallel_config.world_size * config.parallel_config.data_parallel_size

    @property
    def failed(self) -> bool:
        return self._client.errored

    async def generate(self, request: GenerateRequest, request_id: str, salt: str) -> AsyncIterator[Piece]:
        try:
            prompt, shown = await self._prompt(request, salt)
            params = sampling_params(request.sampling_params)
            async for output in self._client.generate(prompt, params, request_id, priority=request.priority,
                                                      lora_request=self._adapters.get(request.model)):  # fmt: skip
                yield to_piece(output.outputs[0])._replace(prompt=shown)
        except Refusal as error:
            raise ValueError(str(error)) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise InferenceFailure(f"vLLM failed: {error.__cause__ or error}") from error

    async def _prompt(self, request: GenerateRequest, salt: str) -> tuple[Any, ShownPrompt | None]:
        """What vLLM samples from, and the prompt with the tokens of its images, where it has any."""
        if not request.content_parts:
            return tokens_input(request.token_ids, cache_salt=salt), None
        pixels = [decode(from_data_uri(part.url)) for part in request.content_parts]
        given = TokensPrompt(prompt_token_ids=request.token_ids, multi_modal_data={"image": pixels}, cache_salt=salt)
        [prompt] = await self._client.renderer.render_cmpl_async([given])
        spans = [(place.offset, place.length) for place in prompt["mm_placeholders"]["image"]]
        return prompt, ShownPrompt(token_ids=prompt["prompt_token_ids"], images=spans)

    async def score(self, token_ids: list[int], salt: str) -> list[float]:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)  # fmt: skip
        async for output in self._client.generate(tokens_input(token_ids, cache_salt=salt), params, salt):
            scores = output.prompt_logprobs
        return [entry[token].logprob for token, entry in zip(token_ids[1:], scores[1:], strict=True)]

    async def pause(self, *, recompute: bool) -> dict[str, int]:
        """Stop the scheduler and keep its requests, none of whose tokens leave `generate` before the last.

        `recompute` preempts the running requests, so that resuming them prefills prompt and reply anew, and drops the
        prefix cache. vLLM reports an idle scheduler on the channel that carries outputs, hence after all of them; then
        its output loop has to hand them on.
        """
        await self._client.pause_generation(mode="keep", clear_cache=recompute)
        while not (self._outputs.empty() and self._idle.is_set()):
            if self.failed:
                raise InferenceFailure("the engine died while it was paused; see its log")
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # requests woken by the last output run before this task
        states = self._client.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states if state.detokenizer}

    async def resume(self) -> None:
        await self._client.resume_generation()

    async def call_workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        """With data parallelism, the answers of the first engine; all of them have finished."""
        return await self._client.collective_rpc(method, args=args)

    async def tell_version(self, version: str) -> None:
        """Let vLLM mark its own outputs, in releases that do so."""
        if hasattr(self._client, "update_weight_version"):
            await self._client.update_weight_version(version)

    async def _receive_noting_idleness(self) -> Any:
        """vLLM's output loop asks for the next output once the last one lies with its requests."""
        self._idle.set()
        outputs = await self._receive()
        self._idle.clear()
        return outputs


@asynccontextmanager
async def start(args: Namespace, adapters: Sequence[str]) -> AsyncIterator[tuple[VllmEngine, FastAPI]]:
    """A loaded engine, with places for `adapters`, and vLLM's own application; its processes end with the context."""
    async with build_async_engine_client(args) as client:
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        with without_decisions():
            await init_app_state(client, app.state, args, tasks)
        yield VllmEngine(client, adapters), app


def run_headless(args: Namespace) -> None:
    """Run the ranks of this node without answering requests. Returns, or exits by SIGTERM, once they have ended."""
    from vllm.entrypoints.cli.serve import run_headless as run

    args.api_server_count = 0
    run(args)


@contextmanager
def without_decisions() -> Iterator[None]:
    """Leave out vLLM's route for structured decisions: it encodes English labels when it starts, which ends the engine
    where a tokenizer knows only an alphabet of its own."""
    if not find_spec("vllm.entrypoints.generate.structured_decisions"):
        yield
        return
    module = import_module("vllm.entrypoints.generate.structured_decisions.api_router")
    with patch.object(module, "init_structured_decisions_state", _no_decisions):
        yield


def _no_decisions(client: EngineClient, state: Any, *_: Any) -> None:
    state.serving_structured_decisions = None


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """vLLM's parameters for one completion, told as a whole, with the log-probability of each sampled token.

    Without `max_tokens` a reply may fill the context. With an output for each token, and an object for each
    log-probability, this process would need half as much time again for a token.

    Raises:
        ValueError, Refusal: a parameter is unknown or out of range.
    """
    if given.get("n", 1) != 1:
        raise ValueError("n must be 1: ask once for every completion")
    fixed = {"logprobs": 0, "flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY,
             "detokenize": bool(given.get("stop"))}  # fmt: skip
    try:
        return SamplingParams(**{"max_tokens": None, **given, **fixed})
    except TypeError as error:
        raise ValueError(str(error)) from error


def to_piece(output: CompletionOutput) -> Piece:
    """A whole reply of vLLM. Of each position its log-probabilities hold the sampled token alone."""
    logprobs = output.logprobs.logprobs if output.logprobs else []
    return Piece(list(output.token_ids), logprobs, output.finish_reason, weight_versions(output), output.routed_experts)


def weight_versions(output: CompletionOutput) -> list[Span] | None:
    """vLLM's own version spans of a finished request, in releases that keep them."""
    spans = getattr(output, "weight_versions", None)
    return spans and [(s.version, s.start, s.end) for s in spans]
