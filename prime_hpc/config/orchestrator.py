"""Configuration of the orchestrator: how rollouts are scheduled and become batches."""

from dataclasses import dataclass
from typing import Literal

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative, Positive, Seconds


@dataclass(kw_only=True)
class OrchestratorConfig:
    """Scheduling, staleness and batches."""

    __pydantic_config__ = FORBID_UNKNOWN

    batch_size: Positive = 128
    """Rollouts a step."""
    group_size: Positive = 8
    """Rollouts of one task: the unit of credit assignment."""
    max_staleness: NonNegative = 8
    """Bound on (n-1) minus the version that sampled a token of batch n; 0 samples and trains in turn."""
    max_lead: Positive = 1
    """Batches that may be shipped and not yet trained; sampling goes on meanwhile."""
    max_inflight: Positive | None = None
    """Rollouts that run at once; batch_size when left out."""
    drop_zero_advantage: bool = True
    """Leave tokens without advantage out of the mask and of the normaliser."""
    max_empty_batches: Positive = 10
    """Batches in a row without a trainable token after which the run stops."""
    transport: Literal["zmq", "files"] = "zmq"
    """How batches reach the trainer: zmq or files."""
    progress_every_s: Seconds = 10.0
    """Seconds between progress lines."""
