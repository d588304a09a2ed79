"""Which rows of which files a step trains: a pure function of its number, so that a resumed run needs no state."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Draw(NamedTuple):
    """Row `row` of file `file`, in the `turn`-th pass through that file (from 0)."""

    turn: int
    file: int
    row: int

    def __str__(self) -> str:
        return f"{self.turn}.{self.file}.{self.row}"


class RowOrder:
    """An epoch is as many rows as the files have together: each file once, or its share of them.

    A file goes on where the epoch before left it, so all of its rows come equally often. Where `shuffle` is off, files
    follow each other in every epoch.
    """

    def __init__(self, rows: Sequence[int], shares: Sequence[float] | None, seed: int, shuffle: bool):
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._taken = list(rows) if shares is None else apportion(sum(rows), shares)
        self._starts = np.cumsum([0, *self._taken])
        self._permutation = lru_cache(maxsize=2 * len(rows) + 2)(self._permute)

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch."""
        return int(self._starts[-1])

    def batch(self, step: int, size: int) -> list[Draw]:
        """The rows of batch `step`, counted from 1."""
        return [self._draw(*divmod(p, self.epoch_rows)) for p in range((step - 1) * size, step * size)]

    def _draw(self, epoch: int, position: int) -> Draw:
        slot = self._permutation(self.epoch_rows, epoch)[position]
        file = int(np.searchsorted(self._starts, slot, side="right")) - 1
        turn, row = divmod(epoch * self._taken[file] + int(slot - self._starts[file]), self._rows[file])
        if self._taken[file] != self._rows[file]:  # else the order of the epoch is order enough
            row = int(self._permutation(self._rows[file], turn, file + 1)[row])
        return Draw(turn, file, row)

    def _permute(self, count: int, *seed: int) -> np.ndarray:
        return np.random.default_rng((self._seed, *seed)).permutation(count) if self._shuffle else np.arange(count)


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `shares` that add up to `total`, by largest remainders; none is below 1."""
    exact = np.array(shares) / sum(shares) * total
    counts = np.maximum(np.floor(exact).astype(int), 1)
    for i in np.argsort(counts - exact, kind="stable")[: max(0, total - counts.sum())]:
        counts[i] += 1
    return counts.tolist()
