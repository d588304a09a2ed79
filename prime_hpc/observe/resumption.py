"""How a run that has ended goes on."""

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.transport.checkpoints import complete_steps


def how_to_resume(paths: RunPaths) -> str:
    """Where the run would go on from, and by which command."""
    steps = complete_steps(paths.checkpoints)
    where = f"go on from step {steps[-1]}" if steps else "start it again from the beginning"
    return f"to {where}: python -m prime_hpc.resume {paths.root}"
