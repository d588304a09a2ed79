"""A tiny model and examples to warm it up: `python -m tools.make_warmup EXPERIMENT --out DIR`.

For `alphabet_sort_cpu` the examples are sorted lists, for `kuhn_poker_cpu` a beginner's moves, so that the
model knows how to play and little of how to win, for `proposer_solver_cpu` sums, set and done in turn.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import yaml
from transformers.utils import logging

from prime_hpc.config.compose import conf_dir
from prime_hpc.envs.alphabet_sort.taskset import AlphabetSortConfig, AlphabetSortTaskset
from prime_hpc.envs.kuhn_poker.game import MOVES, blunders
from prime_hpc.envs.kuhn_poker.taskset import CARDS, KuhnPokerConfig, told
from prime_hpc.envs.proposer_solver.sums import random_sum, value_of
from prime_hpc.envs.proposer_solver.taskset import ProposerSolverConfig
from prime_hpc.models.tiny import make_tiny_model

SEED_OFFSET = 1_000_000
"""Keeps the examples apart from the tasks of RL, which are drawn from small seeds."""

Conversation = list[tuple[str, str]]
"""What the user says and what is right to reply, turn by turn."""


def sorted_lists(config: AlphabetSortConfig) -> Iterator[Conversation]:
    """Conversations of `alphabet_sort`."""
    for task in AlphabetSortTaskset(config):
        data = task.data
        yield [(said, data.separator.join(answer))
               for said, answer in zip([data.prompt, *data.further], data.answers, strict=True)]  # fmt: skip


def beginners_moves(config: KuhnPokerConfig) -> Iterator[Conversation]:
    """What one player of `kuhn_poker` was told and did up to a turn, and a move at random; one that loses for sure is
    drawn again, once."""
    generator = random.Random(config.seed)
    while True:
        before, moves = generator.choice(list(MOVES.items()))
        card, history = generator.randrange(len(CARDS)), before.split()
        player = len(history) % 2
        made = [*history, generator.choice(moves)]
        if blunders(card, player, made).get("blunder"):
            made = [*history, generator.choice(moves)]
        yield [(told(config.prompt, card, player, made[:i], MOVES[" ".join(made[:i])]), made[i])
               for i in range(player, len(made), 2)]  # fmt: skip


def sums(config: ProposerSolverConfig) -> Iterator[Conversation]:
    """A sum of two numbers as the proposer of `proposer_solver` writes it, then the same as the solver does it."""
    generator = random.Random(config.seed)
    while True:
        number = generator.randint(1, config.largest)
        text = random_sum(generator, config.largest, number)
        yield [(config.propose.replace("{number}", str(number)), text)]
        yield [(config.solve.replace("{sum}", text), str(value_of(text)))]


MAKERS: dict[str, tuple[type, Callable[..., Iterator[Conversation]]]] = {
    "alphabet_sort_cpu": (AlphabetSortConfig, sorted_lists),
    "kuhn_poker_cpu": (KuhnPokerConfig, beginners_moves),
    "proposer_solver_cpu": (ProposerSolverConfig, sums),
}


def examples(experiment: str, seed: int, count: int) -> list[Conversation]:
    """Conversations that fit the tasks of an experiment."""
    config = yaml.safe_load((conf_dir() / "experiment" / f"{experiment}.yaml").read_text())
    arguments = config["env"]["train"][0]["args"]
    kind, make = MAKERS[experiment]
    return list(islice(make(kind(**{**arguments, "num_tasks": count, "seed": SEED_OFFSET + seed})), count))


def row(conversation: Conversation) -> dict[str, list[dict[str, str]]]:
    """A row of SFT data."""
    return {"messages": [{"role": role, "content": text} for turn in conversation
                         for role, text in zip(("user", "assistant"), turn, strict=True)]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("experiment", choices=MAKERS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and of sft.jsonl")
    parser.add_argument("--rows", type=int, default=30_000, help="examples in sft.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and examples")
    args = parser.parse_args()
    logging.disable_progress_bar()
    made = examples(args.experiment, args.seed, args.rows)
    alphabet = "".join(sorted({letter for conversation in made for turn in conversation for letter in "".join(turn)}))
    make_tiny_model(args.out, args.seed, alphabet)
    (args.out / "sft.jsonl").write_text("".join(json.dumps(row(conversation)) + "\n" for conversation in made))


if __name__ == "__main__":
    main()
