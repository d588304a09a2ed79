"""Which task a source gives next: a pure function of seed, epoch and number of draws, so a cursor restores it."""

import random

from prime_hpc.config.env import SourceConfig


class TaskOrder:
    """Tasks of one source, shuffled anew every epoch; an endless taskset is taken in its own order."""

    def __init__(self, source: SourceConfig, num_tasks: int | None, seed: int, draws: int = 0):
        self.num_tasks = min(filter(None, (num_tasks, source.num_tasks)), default=None)
        self.draws = draws
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def draw(self) -> tuple[int, int]:
        """The number of this draw and the index of its task."""
        draw = self.draws
        self.draws += 1
        if self.num_tasks is None:
            return draw, draw
        epoch, position = divmod(draw, self.num_tasks)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.num_tasks))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return draw, self._order[position]


class Mixture:
    """Which source the next group comes from: the one furthest behind its share. Needs no state but the draws."""

    def __init__(self, ratios: dict[str, float], orders: dict[str, TaskOrder]):
        self._ratios = ratios
        self._orders = orders

    def draw(self) -> tuple[str, int, int]:
        """Source, number of the draw, index of the task."""
        source = min(self._ratios, key=lambda s: (self._orders[s].draws + 1) / self._ratios[s])
        return source, *self._orders[source].draw()
