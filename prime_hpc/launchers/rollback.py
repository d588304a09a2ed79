"""Sends the trainer back to the newest checkpoint that is whole, on a lineage of its own."""

from pathlib import Path

import msgspec

from prime_hpc.cluster.files import write_atomic, write_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.errors import CorruptData
from prime_hpc.plan.run_plan import Fork, RunPlan, read_forks
from prime_hpc.transport.checkpoints import newest_first, verify


def roll_back(plan: RunPlan, paths: RunPaths) -> None:
    """Change `plan` (in memory and on disk) so that trainer ranks that start now go back.

    The new lineage abandons every version past the checkpoint: weights of the same name may differ from now on.
    """
    step = 0
    checkpoint = newest_whole(paths) or (Path(plan.checkpoint) if plan.checkpoint else None)
    if checkpoint:
        step = verify(checkpoint).step
        plan.checkpoint = str(checkpoint)
    forks = read_forks(paths.forks)
    lineage = (forks[-1].lineage if forks else 0) + 1
    plan.forks = [*forks, Fork(lineage=lineage, step=step)]
    write_json(paths.forks, msgspec.to_builtins(plan.forks), durable=True)
    write_atomic(paths.plan, plan.dump())


def newest_whole(paths: RunPaths) -> Path | None:
    """The newest complete checkpoint whose files match their digests, on a lineage that was not abandoned."""
    for checkpoint in newest_first(paths.checkpoints, read_forks(paths.forks)):
        try:
            verify(checkpoint)
        except CorruptData:
            continue
        return checkpoint
    return None
