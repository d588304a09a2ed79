"""Kuhn's poker of three cards: the policy plays against itself."""

from prime_hpc.envs.kuhn_poker.taskset import KuhnPokerEnv, KuhnPokerHarness, KuhnPokerTaskset

__all__ = ["KuhnPokerEnv", "KuhnPokerHarness", "KuhnPokerTaskset"]
