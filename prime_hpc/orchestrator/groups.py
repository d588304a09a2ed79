"""Groups of rollouts of one task, from the draw of the task to the last rollout's end."""

import time
from dataclasses import dataclass, field

from prime_hpc.orchestrator.journal import GroupOpened
from prime_hpc.transport.messages import PolicyVersion, Rollout, RolloutDone


@dataclass
class Group:
    """`size` rollouts of one task; `done` holds those that ended, with reward or with failure."""

    group_id: str
    source: str
    task_index: int
    version: PolicyVersion
    size: int
    done: list[RolloutDone] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    informative: bool = True
    """Once finished: whether it would train anything."""

    @classmethod
    def restored(cls, opened: GroupOpened, done: list[RolloutDone], size: int) -> "Group":
        """A group as the journal tells it."""
        return cls(opened.group_id, opened.source, opened.task_index, opened.version, size, list(done))

    @property
    def rollouts(self) -> list[Rollout]:
        return [d.rollout for d in self.done]

    @property
    def scored(self) -> list[Rollout]:
        """Rollouts with a reward: the only ones that credit assignment sees."""
        return [r for r in self.rollouts if r.failure is None]

    @property
    def finished(self) -> bool:
        return len(self.done) >= self.size
