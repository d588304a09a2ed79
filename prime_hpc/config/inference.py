"""Configuration of the inference fleet."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative, Positive, Seconds, UserPath


@dataclass(kw_only=True)
class InferenceBench:
    """The engines alone (`mode: bench_inference`) under a load of random prompts."""

    __pydantic_config__ = FORBID_UNKNOWN

    concurrency: Annotated[list[Positive], Field(min_length=1)] = field(default_factory=lambda: [1, 8, 32])
    """Requests at once over all engines; each number is measured by itself, in this order."""
    rounds: Positive = 4
    """Requests are this many times those at once."""
    prompt_tokens: Positive = 512
    """Tokens of a prompt."""
    shared_tokens: NonNegative = 0
    """Tokens at the begin of a prompt that all prompts share, for the prefix cache."""
    reply_tokens: Positive = 128
    """Tokens of a reply."""
    route: Literal["completions", "generate"] = "completions"
    """completions: the streaming route of OpenAI's protocol. generate: the token-in route of training, which answers
    once, so that there is no time of the first token."""


@dataclass(kw_only=True)
class AttachConfig:
    """A fleet that is there already, whose engines are used in place of engines of this run and stay after it."""

    __pydantic_config__ = FORBID_UNKNOWN

    run: UserPath | None = None
    """Directory of a run with mode=serve."""
    urls: list[str] = field(default_factory=list)
    """Root of each engine, without `/v1`, where that directory cannot be seen."""
    token_file: UserPath | None = None
    """File with the token of the engines at `urls`; that of a `run` is found."""
    version: Annotated[str, Field(pattern=r"^\d+\.\d+$")] = "0.0"
    """Version that a run without a trainer expects the engines to serve; 0.0 is the model they were started with."""

    @property
    def on(self) -> bool:
        """Whether the engines are those of another run."""
        return self.run is not None or bool(self.urls)


@dataclass(kw_only=True)
class InferenceConfig:
    """vLLM engines. Arguments of vLLM itself pass through under `vllm`, by vLLM's names."""

    __pydantic_config__ = FORBID_UNKNOWN

    replicas: Positive = 1
    """Independent engines."""
    gpus_per_replica: NonNegative | None = None
    """GPUs of one engine; by default tensor x pipeline x data parallel size of `vllm` where there are GPUs, else 0.
    Under Slurm an engine that needs more than one node has is spread over several whole ones."""
    engine: str = "prime_hpc.inference"
    """Module of the engine process (`python -m ENGINE PLAN --process NAME`); any other speaks the same protocol."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Options of another engine module; vLLM takes none of these."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm serve`, e.g. `max_model_len: 4096`."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the engine processes."""
    attach: AttachConfig = field(default_factory=AttachConfig)
    """Engines of another run in place of `replicas` own ones."""
    router: Literal["none", "builtin", "vllm"] = "none"
    """mode=serve: one address before all engines. builtin: sessions stay with their engine, load is even, answers are
    of one version. vllm: the program `vllm-router` (extra `router`)."""
    start_timeout_s: Seconds = 600.0
    """Deadline for an engine to answer its health route."""
    stamps_kept: Positive = 65536
    """Finished requests whose version stamps an engine remembers."""
    bench: InferenceBench = field(default_factory=InferenceBench)
    """mode=bench_inference."""
