"""Configuration of frozen models: teachers and references, which no update ever reaches."""

from dataclasses import dataclass, field
from typing import Any

from prime_hpc.config.sections import FORBID_UNKNOWN, Positive, UserPath


@dataclass(kw_only=True)
class FrozenModel:
    """A model that scores or samples and never changes: engines of this run (`path`), or a vLLM server elsewhere
    (`base_url`). It has the policy's vocabulary, since token ids go back and forth."""

    __pydantic_config__ = FORBID_UNKNOWN

    path: UserPath | None = None
    """Directory in Hugging Face layout; the run starts engines for it beside those of the policy, each with as many
    GPUs."""
    replicas: Positive = 1
    """Engines of `path`."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm serve` on top of `inference.vllm`."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Options of another engine module on top of `inference.engine_args`."""
    base_url: str | None = None
    """Root of a vLLM server that is there already, without `/v1`."""
    model: str | None = None
    """Name of the model at `base_url`."""
    key_variable: str | None = None
    """Environment variable of the orchestrator's node that holds the key of `base_url`."""
