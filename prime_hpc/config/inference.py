"""Configuration of the inference fleet."""

from dataclasses import dataclass, field
from typing import Any

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative, Positive, Seconds


@dataclass(kw_only=True)
class InferenceConfig:
    """vLLM engines. Arguments of vLLM itself pass through under `vllm`, by vLLM's names."""

    __pydantic_config__ = FORBID_UNKNOWN

    replicas: Positive = 1
    """Independent engines."""
    gpus_per_replica: NonNegative | None = None
    """GPUs of one engine; by default tensor x pipeline x data parallel size of `vllm` where there are GPUs, else 0.
    A dry run for Slurm may plan an engine on several whole nodes."""
    engine: str = "prime_hpc.inference"
    """Module of the engine process (`python -m ENGINE PLAN --process NAME`); any other speaks the same protocol."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Options of another engine module; vLLM takes none of these."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm serve`, e.g. `max_model_len: 4096`."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the engine processes."""
    start_timeout_s: Seconds = 600.0
    """Deadline for an engine to answer its health route."""
    stamps_kept: Positive = 65536
    """Finished requests whose version stamps an engine remembers."""
