"""How long rollouts are: guessed before a run, and read from the metrics of one that was alike."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prime_hpc.config.run import RunConfig


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
    limits = [source.sampling.max_tokens or config.seq_len for source in config.env.train] or [config.seq_len]
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
