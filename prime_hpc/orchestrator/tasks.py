"""Where the next group's task comes from: a source by its share, then a task by the source's order."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prime_hpc.algorithms.curricula import Mixture, make_sampler
from prime_hpc.config.checks import source_name
from prime_hpc.config.env import SourceConfig
from prime_hpc.orchestrator.journal import JournalState


class TaskStream:
    """The training sources of a run. What the journal holds restores them."""

    def __init__(self, sources: Mapping[str, SourceConfig], num_tasks: Mapping[str, int | None], seed: int):
        self._samplers = {
            name: make_sampler(source.order, min(filter(None, (num_tasks[name], source.num_tasks)), default=None), seed)
            for name, source in sources.items()
        }
        self._mixture = Mixture({name: _shares(source) for name, source in sources.items()})

    @property
    def sources(self) -> list[str]:
        return list(self._samplers)

    def draw(self, step: int, resting: Collection[str] = ()) -> tuple[str, int, int]:
        """Source, number of the draw within it, and index of the task, for a group that is opened for batch `step`."""
        source = self._mixture.draw(step, resting)
        sampler = self._samplers[source]
        return source, sampler.draws, sampler.draw()

    def set_ratios(self, sources: Sequence[SourceConfig]) -> None:
        """Shares of the sources from now on."""
        self._mixture.set_shares({source_name(source): _shares(source) for source in sources})

    def observe(self, source: str, task: int, rewards: Sequence[float]) -> None:
        """A group of the task has ended with these rewards; without any it says nothing."""
        if rewards:
            self._samplers[source].observe(task, sum(rewards) / len(rewards))

    def metrics(self) -> dict[str, float]:
        """Tasks in each pool of the sources that have pools; names as in docs/metrics.md."""
        return {f"pools/{name}/{pool}": float(size) for name, sampler in self._samplers.items()
                for pool, size in sampler.sizes().items()}  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Plain data, for the journal."""
        samplers = {name: sampler.state() for name, sampler in self._samplers.items()}
        return {"mixture": self._mixture.state(), "samplers": samplers}

    def restore(self, journal: JournalState) -> None:
        """Go on behind the last record of the journal: from the state of the last batch and what was drawn since."""
        memory = journal.memory.tasks
        self._mixture.restore(memory.get("mixture", {}))
        for source in journal.drawn:
            self._mixture.spend(source, journal.step + 1)
        for name, sampler in self._samplers.items():
            sampler.restore(memory.get("samplers", {}).get(name) or sampler.state())
            sampler.draws = journal.draws.get(name, 0)


def _shares(source: SourceConfig) -> Mapping[int, float]:
    return source.ratio_schedule or {0: source.ratio}
