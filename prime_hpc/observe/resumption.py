"""How a run that has ended goes on."""

from pathlib import Path

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.fleet_checks import KEY
from prime_hpc.errors import ConfigProblem
from prime_hpc.observe.run_facts import read_run
from prime_hpc.transport.checkpoints import complete_steps


def how_to_resume(paths: RunPaths) -> str:
    """Where the run would go on from, and by which command."""
    steps = complete_steps(paths.checkpoints)
    where = f"go on from step {steps[-1]}" if steps else "start it again from the beginning"
    return f"to {where}: python -m prime_hpc.resume {paths.root}"


def find_ended_fleet(run_dir: Path) -> ConfigProblem | None:
    """What is wrong with attaching to the fleet in `run_dir`, where that is at work no more."""
    facts = read_run(run_dir)
    if not facts.over:
        return None
    expected = f"a fleet at work, and this one has ended; {how_to_resume(facts.paths)}"
    return ConfigProblem(f"{KEY}.run", str(run_dir), expected)
