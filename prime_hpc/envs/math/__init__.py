"""Answer questions of mathematics, checked by math-verify (extra `math`)."""

from prime_hpc.envs.math.taskset import MathHarness, MathTaskset

__all__ = ["MathHarness", "MathTaskset"]
