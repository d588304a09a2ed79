"""Where processes of a run answer."""

from collections.abc import Iterable
from pathlib import Path

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.cluster.rendezvous import Rendezvous
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan, load


def engine_addresses(run_dir: Path) -> dict[str, str | None]:
    """Engines by name, in whatever attempt the run is now; None for one that is starting or gone."""
    paths = RunPaths(run_dir)
    plan = load(paths.plan)
    return addresses(paths, plan, plan.engines())


def addresses(paths: RunPaths, plan: RunPlan, processes: Iterable[ProcessPlan]) -> dict[str, str | None]:
    """The same of any processes of a plan."""
    rendezvous = Rendezvous(paths.rendezvous, "", plan.attempt)
    return {process.name: (rendezvous.read(process.name) or {}).get("base_url") for process in processes}
