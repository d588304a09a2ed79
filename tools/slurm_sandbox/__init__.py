"""A real Slurm on one machine, for tests: `python -m tools.slurm_sandbox up --dir DIRECTORY`."""

from tools.slurm_sandbox.sandbox import SlurmSandbox as SlurmSandbox
