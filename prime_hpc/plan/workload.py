"""What a step works on: how long rollouts are, guessed before a run or read from the metrics of one that was alike, how
many there are, and how many rows they fill."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import rows_at_once


@dataclass(frozen=True)
class Workload:
    """Mean tokens of a rollout, and where the figures come from."""

    prompt: float
    completion: float
    source: str

    @property
    def tokens(self) -> float:
        return self.prompt + self.completion


def guess(config: RunConfig) -> Workload:
    """Replies of half of their limit after prompts of a quarter of what is left."""
    if config.mode == "sft":
        return Workload(config.seq_len / 4, config.seq_len / 4, "guess: rows of half of seq_len")
    if config.mode == "bench":
        return Workload(config.seq_len / 2, config.seq_len / 2, "samples of seq_len")
    sources = config.env.train or config.env.eval.sources
    limits = [source.sampling.max_tokens or config.seq_len for source in sources] or [config.seq_len]
    completion = float(np.mean(limits)) / 2
    words = "guess: replies of half of their limit, prompts of a quarter of the rest"
    return Workload((config.seq_len - completion) / 4, completion, words)


def measured(rows: Iterable[Mapping[str, Any]], name: str) -> Workload | None:
    """From the rows of a run's metrics; None where none has rollouts."""
    keys = ("train/all/prompt_tokens", "train/all/completion_tokens")
    pairs = [[row[key] for key in keys] for row in rows if all(row.get(key) is not None for key in keys)]
    if not pairs:
        return None
    prompt, completion = np.mean(pairs, axis=0)
    return Workload(float(prompt), float(completion), f"measured in {name}")


def longest_row(config: RunConfig) -> int:
    """Tokens of a packed row at most."""
    return config.trainer.micro_batch_tokens or config.seq_len


def sequences(config: RunConfig) -> int:
    """Rollouts, or samples, of a step."""
    if config.mode == "bench":
        return config.trainer.bench.rows * rows_at_once(config) * max(1, longest_row(config) // config.seq_len)
    return config.trainer.sft.batch_size if config.mode == "sft" else config.orchestrator.batch_size


def micro_batches(config: RunConfig, count: int, workload: Workload) -> int:
    """Rows of `count` sequences that a rank trains on one after the other, when all are full."""
    return ceil(count * workload.tokens / longest_row(config) / rows_at_once(config))
