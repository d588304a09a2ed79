"""Find a hidden word by guessing: a game of several turns."""

from prime_hpc.envs.wordle.taskset import WordleEnv, WordleHarness, WordleTaskset

__all__ = ["WordleEnv", "WordleHarness", "WordleTaskset"]
