"""Sort names, and again as more come in: a procedural environment of several turns."""

from prime_hpc.envs.alphabet_sort.taskset import AlphabetSortEnv, AlphabetSortHarness, AlphabetSortTaskset

__all__ = ["AlphabetSortEnv", "AlphabetSortHarness", "AlphabetSortTaskset"]
