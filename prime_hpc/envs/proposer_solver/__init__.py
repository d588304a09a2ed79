"""One seat sets sums, the other does them: both are the policy."""

from prime_hpc.envs.proposer_solver.taskset import ProposerSolverEnv, ProposerSolverHarness, ProposerSolverTaskset

__all__ = ["ProposerSolverEnv", "ProposerSolverHarness", "ProposerSolverTaskset"]
