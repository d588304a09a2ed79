"""Rows as micro-batches: every rank renders the rows that it trains, when it needs them."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prime_hpc.algorithms.packing import arrange, fill
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sft_rows import PARQUET, RowFile, line_ends, open_rows
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.sft_data import Render, Row, to_sample
from prime_hpc.trainer.sft_order import Draw
from prime_hpc.transport.messages import MicroBatch, Sample

CACHED_TOKENS = 2**26
"""Of rendered rows that a rank keeps, 5 bytes each."""


@dataclass(frozen=True)
class Packing:
    """The rows of a batch that have a token to train, and which of them this rank has in each of its micro-batches."""

    draws: list[Draw]
    lengths: list[int]
    micro_batches: list[list[int]]
    cut: int
    left_out: int
    empty: bool
    """Whether nothing trains, and its only row stands in for a batch."""

    def mine(self) -> list[Draw]:
        """The rows that this rank trains."""
        return [self.draws[i] for row in self.micro_batches for i in row]


class RowPacker:
    """Packs rows by their lengths, which all ranks know: each renders a part of the new rows and tells the others.

    All ranks call `plan` alike; `fill` and `render_ahead` are a rank's own.
    """

    def __init__(self, files: Sequence[RowFile], render: Render, world: World, config: RunConfig):
        self._world, self._seq_len = world, config.seq_len
        self._row_tokens = config.trainer.micro_batch_tokens or config.seq_len
        self._lengths = [np.zeros(len(file), dtype=np.int32) for file in files]
        """Tokens of each row, negative where none of them trains; 0 is not known yet."""
        self._rows = _RenderedRows(files, render)
        self._thread = ThreadPoolExecutor(1)
        self._ahead: Future | None = None

    def plan(self, draws: list[Draw]) -> Packing:
        """Which rank trains which rows. Those without a token to train are left out; a batch of such keeps one.

        Raises:
            ConfigurationError: on all ranks, if a row cannot be rendered on one.
        """
        self._measure(self._unknown(draws))
        lengths = [int(self._lengths[draw.file][draw.row]) for draw in draws]
        trained = [i for i, length in enumerate(lengths) if length > 0]
        kept = trained or [0]
        capped = [min(abs(lengths[i]), self._seq_len, self._row_tokens) for i in kept]
        rows = arrange(capped, self._world.dp_size, self._row_tokens, lambda row: float(sum(row)))
        return Packing([draws[i] for i in kept], capped, rows[self._world.dp_rank],
                       cut=sum(lengths[i] > self._seq_len for i in kept),
                       left_out=len(draws) - len(trained), empty=not trained)  # fmt: skip

    def fill(self, packing: Packing) -> list[MicroBatch]:
        """The micro-batches of this rank."""
        self._settle()

        def sample(i: int) -> Sample:
            return to_sample(self._rows[packing.draws[i]], str(packing.draws[i]), self._seq_len)

        shortest = int(np.argmin(packing.lengths))
        return fill(packing.micro_batches, sample, shortest, self._row_tokens)

    def render_ahead(self, packing: Packing, draws: list[Draw]) -> None:
        """Render in the background what `fill` will want of `packing`, and what `plan` will want of the rows behind."""
        wanted = [*packing.mine(), *self._share(self._unknown(draws), self._world.dp_rank)]
        self._ahead = self._thread.submit(lambda: [self._rows[draw] for draw in wanted])

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _measure(self, unknown: list[Draw]) -> None:
        if not unknown:
            return
        self._settle()
        lengths, problems = [], []
        try:
            lengths = [self._signed_length(self._rows[draw]) for draw in self._share(unknown, self._world.dp_rank)]
        except ConfigurationError as error:
            problems = [[problem.key, problem.value, problem.expected] for problem in error.problems]
        ranks = gather({"lengths": lengths, "problems": problems})[:: self._world.row_ranks]
        _raise_any([rank["problems"] for rank in ranks])
        for i, rank in enumerate(ranks):
            for draw, length in zip(self._share(unknown, i), rank["lengths"], strict=True):
                self._lengths[draw.file][draw.row] = length

    def _signed_length(self, row: Row) -> int:
        return len(row.token_ids) if row.mask[1 : self._seq_len].any() else -len(row.token_ids)

    def _unknown(self, draws: list[Draw]) -> list[Draw]:
        """One draw of each row whose length is not known yet, alike on all ranks."""
        return list({draw[1:]: draw for draw in draws if not self._lengths[draw.file][draw.row]}.values())

    def _share(self, draws: list[Draw], dp_rank: int) -> list[Draw]:
        return draws[dp_rank :: self._world.dp_size]

    def _settle(self) -> None:
        """Wait for the background. What failed there fails again where it is wanted."""
        if self._ahead:
            wait([self._ahead])


class _RenderedRows:
    """Rendered rows by draw; the least recently used go first."""

    def __init__(self, files: Sequence[RowFile], render: Render):
        self._files, self._render = files, render
        self._kept: OrderedDict[tuple[int, int], Row] = OrderedDict()
        self._tokens = 0

    def __getitem__(self, draw: Draw) -> Row:
        place = draw.file, draw.row
        if place not in self._kept:
            self._kept[place] = self._render(self._files[draw.file][draw.row])
            self._tokens += len(self._kept[place].token_ids)
            while self._tokens > CACHED_TOKENS and len(self._kept) > 1:
                self._tokens -= len(self._kept.popitem(last=False)[1].token_ids)
        self._kept.move_to_end(place)
        return self._kept[place]


def open_together(paths: Sequence[str], key: str, world: World) -> list[RowFile]:
    """Files of rows, each rank having looked for lines, and for mistakes, in a part of each.

    Raises:
        ConfigurationError: on all ranks, with the first mistake that each has found.
    """
    files = [_open(Path(path), key, world) for path in paths]
    problems = []
    try:
        for file in files:
            for i in range(len(file) * world.rank // world.size, len(file) * (world.rank + 1) // world.size):
                file[i]
    except ConfigurationError as error:
        problems = [[problem.key, problem.value, problem.expected] for problem in error.problems]
    _raise_any(gather(problems))
    return files


def _open(path: Path, key: str, world: World) -> RowFile:
    if path.suffix == PARQUET or not path.is_file():
        return open_rows(path, key)
    parts = gather(line_ends(path, world.rank, world.size).tobytes())
    return open_rows(path, key, np.frombuffer(b"".join(parts), dtype=np.int64))


def _raise_any(problems: list[list[list[str]]]) -> None:
    """Raise what ranks have found, if any has."""
    if found := [ConfigProblem(*problem) for of_rank in problems for problem in of_rank]:
        raise ConfigurationError(found)
