"""Where the next group's task comes from: a source by its share, then a task by the source's order."""

from collections.abc import Mapping, Sequence
from typing import Any

from prime_hpc.algorithms.curricula import Mixture, make_sampler
from prime_hpc.config.env import SourceConfig


class TaskStream:
    """The training sources of a run. Restores exactly from its state and the draws that the journal counted."""

    def __init__(self, sources: Mapping[str, SourceConfig], num_tasks: Mapping[str, int | None], seed: int):
        self._samplers = {
            name: make_sampler(source.order, min(filter(None, (num_tasks[name], source.num_tasks)), default=None), seed)
            for name, source in sources.items()
        }
        self._mixture = Mixture({name: s.ratio_schedule or {0: s.ratio} for name, s in sources.items()})

    def draw(self, step: int) -> tuple[str, int, int]:
        """Source, number of the draw within it, and index of the task, for a group that is opened for batch `step`."""
        source = self._mixture.draw(step)
        sampler = self._samplers[source]
        return source, sampler.draws, sampler.draw()

    def observe(self, source: str, task: int, rewards: Sequence[float]) -> None:
        """A group of the task has ended with these rewards; without any it says nothing."""
        if rewards:
            self._samplers[source].observe(task, sum(rewards) / len(rewards))

    def state(self) -> dict[str, Any]:
        """Plain data, for the journal."""
        samplers = {name: sampler.state() for name, sampler in self._samplers.items()}
        return {"mixture": self._mixture.state(), "samplers": samplers}

    def restore(self, state: Mapping[str, Any], draws: Mapping[str, int]) -> None:
        """Go on from `state` (empty before the first batch) with as many draws of each source as `draws` says."""
        self._mixture.restore(state.get("mixture", {}))
        for name, sampler in self._samplers.items():
            sampler.restore(state.get("samplers", {}).get(name) or sampler.state())
            sampler.draws = draws.get(name, 0)
