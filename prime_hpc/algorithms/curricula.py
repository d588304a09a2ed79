"""Which task and which source come next. Every class restores exactly from its `state()`, which is plain data."""

import random
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from prime_hpc.config.curriculum import DifficultyPools, Pool, Sequential, Shuffled, TaskSampling
from prime_hpc.errors import ConfigProblem, ConfigurationError

UNSEEN = "unseen"


class Sampler(Protocol):
    """Tasks of one source by number. `draws` counts them."""

    draws: int

    def draw(self) -> int:
        """The next task."""
        ...

    def observe(self, task: int, score: float) -> None:
        """A group of `task` has ended with this mean reward."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def sizes(self) -> dict[str, int]:
        """Tasks in each pool, where there are pools."""
        ...


class OrderedSampler:
    """Every task once an epoch: in the taskset's order, or shuffled anew each epoch. An endless taskset is taken as it
    comes. The number of draws is all there is to remember."""

    def __init__(self, num_tasks: int | None, seed: int | None = None):
        """`seed` shuffles; None keeps the order."""
        self.draws = 0
        self._num_tasks, self._seed = num_tasks, seed
        self._epoch, self._order = -1, list[int]()

    def draw(self) -> int:
        draw, self.draws = self.draws, self.draws + 1
        if self._num_tasks is None:
            return draw
        epoch, position = divmod(draw, self._num_tasks)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._num_tasks))
            if self._seed is not None:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[position]

    def observe(self, task: int, score: float) -> None:
        """Order does not depend on rewards."""

    def state(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.draws = state["draws"]

    def sizes(self) -> dict[str, int]:
        return {}


class PoolSampler:
    """Tasks at random, weighted by the pool that the latest mean reward puts them in; tasks never seen weigh 1.

    The pool of a score is the first, by ascending threshold, that the score does not exceed, else the last. A draw
    depends on its number and on the contents of the pools alone. Where nothing has weight, all tasks are alike.
    """

    def __init__(self, num_tasks: int, pools: Sequence[Pool], seed: int):
        self.draws = 0
        self._num_tasks, self._seed = num_tasks, seed
        self._pools = sorted(pools, key=lambda pool: pool.threshold)
        self.restore({"draws": 0, "tasks": [], "scores": []})

    def draw(self) -> int:
        chance = random.Random(f"{self._seed}/{self.draws}")
        self.draws += 1
        weights = [len(self._members[name]) * weight for name, weight in self._weights().items()]
        if not any(weights):
            return chance.randrange(self._num_tasks)
        [members] = chance.choices(list(self._members.values()), weights)
        return chance.choice(members)

    def observe(self, task: int, score: float) -> None:
        before, after = self._pool_of(task), self._pool_for(score)
        self._scores[task] = score
        if before != after:
            del self._members[before][bisect_left(self._members[before], task)]
            insort(self._members[after], task)

    def state(self) -> dict[str, Any]:
        return {"draws": self.draws, "tasks": list(self._scores), "scores": list(self._scores.values())}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.draws = state["draws"]
        self._scores: dict[int, float] = dict(zip(state["tasks"], state["scores"], strict=True))
        self._members: dict[str, list[int]] = {name: [] for name in self._weights()}
        for task in range(self._num_tasks):
            self._members[self._pool_of(task)].append(task)

    def sizes(self) -> dict[str, int]:
        """Tasks in each pool, those never seen too."""
        return {name: len(members) for name, members in self._members.items()}

    def _weights(self) -> dict[str, float]:
        return {UNSEEN: 1.0, **{pool.name: pool.weight for pool in self._pools}}

    def _pool_of(self, task: int) -> str:
        return self._pool_for(self._scores[task]) if task in self._scores else UNSEEN

    def _pool_for(self, score: float) -> str:
        return next((pool.name for pool in self._pools if score <= pool.threshold), self._pools[-1].name)


def make_sampler(config: TaskSampling, num_tasks: int | None, seed: int) -> Sampler:
    """The sampler that a source's configuration chooses.

    Raises:
        ConfigurationError: difficulty pools over an endless taskset.
    """
    match config:
        case Sequential():
            return OrderedSampler(num_tasks)
        case Shuffled():
            return OrderedSampler(num_tasks, seed)
        case DifficultyPools():
            if num_tasks is None:
                expected = "another order, or num_tasks: this taskset never ends"
                raise ConfigurationError([ConfigProblem("order.name", config.name, expected)])
            return PoolSampler(num_tasks, config.pools, seed)


class Mixture:
    """Which source the next group comes from. Every draw adds each source's share to its credit and spends one credit
    of the richest source, so that counts follow shares closely even while shares change."""

    def __init__(self, shares: Mapping[str, Mapping[int, float]]):
        """Of each source its share by training step, linear between the steps given and constant outside them."""
        self.set_shares(shares)
        self._credits = dict.fromkeys(shares, 0.0)

    def set_shares(self, shares: Mapping[str, Mapping[int, float]]) -> None:
        """Shares from now on; what each source is owed stays."""
        self._shares = {name: np.array(sorted(points.items()), dtype=float) for name, points in shares.items()}

    def draw(self, step: int, resting: Collection[str] = ()) -> str:
        """The source of a group that is opened for batch `step`; those that rest keep their credit for later."""
        self._earn(step)
        richest = max((name for name in self._credits if name not in resting), key=lambda name: self._credits[name])
        self._credits[richest] -= 1.0
        return richest

    def spend(self, source: str, step: int) -> None:
        """Take note of a draw of `source` that was made for batch `step`."""
        self._earn(step)
        self._credits[source] -= 1.0

    def state(self) -> dict[str, float]:
        return dict(self._credits)

    def restore(self, state: Mapping[str, float]) -> None:
        self._credits.update(state)

    def _earn(self, step: int) -> None:
        shares = {name: float(np.interp(step, points[:, 0], points[:, 1])) for name, points in self._shares.items()}
        total = sum(shares.values())
        for name, share in shares.items():
            self._credits[name] += share / total
