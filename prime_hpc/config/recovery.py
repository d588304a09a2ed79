"""Configuration of recovery: what happens when a process dies or hangs."""

from dataclasses import dataclass, field
from typing import Literal

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative, Seconds


@dataclass(kw_only=True)
class FailurePolicy:
    """What follows the failure of a restart unit."""

    __pydantic_config__ = FORBID_UNKNOWN

    on_failure: Literal["restart", "degrade", "stop"] = "restart"
    """restart: start it again. degrade: go on without it while another does its work. stop: end the run."""
    max_restarts: NonNegative = 10
    """Restarts of one unit within `recovery.window_s`; past them it degrades where it can, else stops."""


@dataclass(kw_only=True)
class RecoveryConfig:
    """Restarts by the supervisor. A unit is an engine, an environment worker, the orchestrator or all trainer ranks."""

    __pydantic_config__ = FORBID_UNKNOWN

    inference: FailurePolicy = field(default_factory=FailurePolicy)
    """Engines. A restarted one takes the current weights before it samples."""
    router: FailurePolicy = field(default_factory=FailurePolicy)
    """The router of a fleet. Requests that go through it when it dies are lost."""
    environment: FailurePolicy = field(default_factory=FailurePolicy)
    """Environment workers. Their episodes run again."""
    orchestrator: FailurePolicy = field(default_factory=FailurePolicy)
    """The orchestrator goes on from its journal."""
    trainer: FailurePolicy = field(default_factory=FailurePolicy)
    """All ranks go back to the newest complete checkpoint and train the same batches again."""
    window_s: Seconds = 3600.0
    """Period over which restarts of a unit are counted."""
    backoff_s: Seconds = 1.0
    """Pause before the first restart; doubled for each further one within the window."""
    backoff_max_s: Seconds = 60.0
    """Longest pause before a restart."""
    hang_s: Seconds = 120.0
    """A process that gives no sign of life for this long is dumped, killed and treated as failed."""
    stuck_s: Seconds = 3600.0
    """A process that lives, but neither gets on with its work nor waits for anybody for this long, is treated alike."""
    full_disk_s: Seconds = 600.0
    """A write that finds the disk full is tried again for this long before it counts as failed."""


@dataclass(kw_only=True)
class PauseConfig:
    """A source of tasks that is past `env.error_budget` pauses, and is tried again now and then; the guard pauses a
    run."""

    __pydantic_config__ = FORBID_UNKNOWN

    max_s: Seconds = 600.0
    """A run in which a source has paused for so long saves and leaves; after a minute where none of its episodes has
    ever ended well. So does one that the guard has paused for so long."""
