"""Which launcher runs a plan."""

from rich.console import Console

from prime_hpc.launchers.local import run_local
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.plan.table import render


def launch_plan(start: RunStart) -> int:
    """Run the plan of `start` under its launcher and return the exit code."""
    console = Console()
    if start.config.launcher.name == "dry_run":
        start.write_dry()
        console.print(render(start.plan))
        console.print(f"\nwrote {start.paths.config} and {start.paths.plan}; nothing was started")
        return 0
    start.write()
    console.print(render(start.plan))
    return run_local(start.plan, start.config)
