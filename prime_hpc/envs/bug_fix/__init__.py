"""Small Python repositories with a failing test: the policy reads, edits and runs until it passes."""

from prime_hpc.envs.bug_fix.taskset import BugFixHarness, BugFixTaskset

__all__ = ["BugFixHarness", "BugFixTaskset"]
