"""Restart units: the processes that start, fail and restart together, as one job step under Slurm."""

from dataclasses import dataclass

from prime_hpc.plan.run_plan import NodeGroup, ProcessPlan, RunPlan


@dataclass(frozen=True)
class Unit:
    """An engine with all its nodes, an environment worker, the orchestrator, or all trainer ranks.

    Its processes are in order of node, equally many on each.
    """

    name: str
    processes: list[ProcessPlan]
    group: NodeGroup

    @property
    def component(self) -> str:
        return self.processes[0].component

    @property
    def first_node(self) -> int:
        """Its first node, counted within its group."""
        return self.processes[0].node

    @property
    def nodes(self) -> int:
        return self.processes[-1].node - self.first_node + 1

    @property
    def per_node(self) -> int:
        """Processes on each of its nodes."""
        return len(self.processes) // self.nodes


def units(plan: RunPlan) -> list[Unit]:
    """Every restart unit of a plan, in order of its processes."""
    grouped: dict[str, list[ProcessPlan]] = {}
    for process in plan.processes:
        grouped.setdefault(unit_name(process), []).append(process)
    return [Unit(name, processes, plan.group(processes[0])) for name, processes in grouped.items()]


def unit_name(process: ProcessPlan) -> str:
    """`orchestrator`, `trainer`, `router`, `inference-2` for each engine, `env-SOURCE-0` for each worker."""
    if process.component == "inference":
        return f"inference-{process.index}"
    return process.name if process.component == "environment" else process.component
