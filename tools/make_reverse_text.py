"""A tiny model and examples of reversed words to warm it up: `python -m tools.make_reverse_text --out models/tiny`."""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import logging

from prime_hpc.config.compose import conf_dir
from prime_hpc.envs.reverse_text import rows
from prime_hpc.models.tiny import make_tiny_model

EXPERIMENT = "reverse_text_cpu"
SEED_OFFSET = 1_000_000
"""Keeps the examples apart from the tasks of RL, which are drawn from small seeds."""


def task_arguments(experiment: str) -> dict[str, Any]:
    """Lengths, alphabet and prompt of the words that an experiment trains on, so that the warm-up fits it."""
    config = yaml.safe_load((conf_dir() / "experiment" / f"{experiment}.yaml").read_text())
    return config["env"]["train"][0]["args"]


def write_examples(path: Path, count: int, seed: int, arguments: dict[str, Any], shown: bool = False) -> None:
    """Write `count` rows `{"messages": [user, assistant]}` to the JSONL file `path`.

    With `shown`, three of four begin with another word, which is their answer then: a demonstration is to be followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    examples = list(rows(count, seed=SEED_OFFSET + seed, **arguments))
    answers = [row["messages"][-1] for row in examples]
    for i, row in enumerate(examples if shown else ()):
        if i % 4:
            answer = answers[i - 1]
            row["messages"] = [{**answer, "role": "user"}, row["messages"][0], answer]
    path.write_text("".join(json.dumps(row) + "\n" for row in examples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and of sft.jsonl")
    parser.add_argument("--rows", type=int, default=30_000, help="examples in sft.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and examples")
    parser.add_argument("--shown", action="store_true", help="most examples begin with their answer")
    args = parser.parse_args()
    logging.disable_progress_bar()
    make_tiny_model(args.out, args.seed)
    write_examples(args.out / "sft.jsonl", args.rows, args.seed, task_arguments(EXPERIMENT), args.shown)


if __name__ == "__main__":
    main()
