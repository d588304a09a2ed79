"""Configuration of the orchestrator: how rollouts are scheduled and become batches."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative, Positive, Seconds


@dataclass(kw_only=True)
class OrchestratorConfig:
    """Scheduling, staleness and batches."""

    __pydantic_config__ = FORBID_UNKNOWN

    batch_size: Positive = 128
    """Rollouts a step; up to a group more where sources have groups of different sizes."""
    group_size: Positive = 8
    """Rollouts of one task: the unit of credit assignment. A training source may have its own."""
    max_staleness: NonNegative = 8
    """Bound on (n-1) minus the version that sampled a token of batch n; 0 samples and trains in turn."""
    on_stale: Literal["drop", "wait"] = "drop"
    """What happens to groups that a further batch would make too old: drop gives them up, wait cuts no batch before
    they have ended, so that no length is at a disadvantage."""
    age_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the policy-gradient weight of a token for every step of its staleness; 1 weighs all ages alike."""
    partial_groups: Literal["train", "drop"] = "train"
    """Groups with a failed rollout: train compares the others, drop gives the group up."""
    max_lead: Positive = 1
    """Batches that may be shipped and not yet trained; sampling goes on meanwhile."""
    max_inflight: Positive | Literal["auto"] | None = None
    """Rollouts that run at once; batch_size when left out. auto follows the engines: it begins with what their KV
    caches hold, grows while they have room, and falls back when they preempt or queue requests."""
    drop_zero_advantage: bool = True
    """Leave tokens without advantage out of the policy gradient and its normaliser. Groups that have no others do not
    count in `batch_size`: more are sampled in their place."""
    max_empty_batches: Positive = 10
    """Times `batch_size` rollouts that may be sampled for one batch; it is then cut as it is, or the run stops where no
    token trains."""
    transport: Literal["zmq", "files"] = "zmq"
    """How batches reach the trainer: zmq or files."""
    progress_every_s: Seconds = 10.0
    """Seconds between progress lines."""

    @property
    def inflight(self) -> int:
        """Rollouts that run at once, as far as is known before the engines are: a batch, where the number is theirs."""
        return self.max_inflight if isinstance(self.max_inflight, int) else self.batch_size
