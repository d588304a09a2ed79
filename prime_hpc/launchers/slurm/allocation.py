"""From a plan to what Slurm is asked for: jobs, and in each the blocks of equal nodes (het groups where several)."""

from collections.abc import Mapping
from dataclasses import dataclass

from prime_hpc.config.cluster import ClusterConfig, ComponentConfig, component
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.plan.run_plan import NodeGroup, RunPlan
from prime_hpc.plan.units import Unit, units

MAIN = "main"
"""The job of the orchestrator, or the only one."""


@dataclass(frozen=True)
class Block:
    """Equal nodes: their groups of the plan, their number (spares included) and what is asked for on each."""

    name: str
    groups: list[NodeGroup]
    nodes: int
    gpus: int
    resources: ComponentConfig

    def number(self, group: NodeGroup) -> int:
        """The first node of `group`, counted within this block."""
        return group.first - min(other.first for other in self.groups)


@dataclass(frozen=True)
class Job:
    """One submission. Its batch script runs on the first node of its first block and starts the steps of its units."""

    name: str
    blocks: list[Block]

    @property
    def outlives_nodes(self) -> bool:
        """Whether a failed node leaves the job running: somewhere there are spare nodes for its processes."""
        return any(group.spare for block in self.blocks for group in block.groups)

    def has(self, group: NodeGroup) -> bool:
        """Whether the nodes of `group` are in this job."""
        return any(group in block.groups for block in self.blocks)

    def block_number(self, group: NodeGroup) -> int:
        """The block with the nodes of `group`: the het group of its steps."""
        return next(i for i, block in enumerate(self.blocks) if group in block.groups)

    def units(self, plan: RunPlan) -> list[Unit]:
        """Restart units whose steps this job runs."""
        return [unit for unit in units(plan) if self.has(unit.group)]


def jobs(plan: RunPlan) -> list[Job]:
    """What is submitted for a plan, the main job first."""
    config = plan.typed_config()
    if config.launcher.target_name == "slurm_single":
        return [Job(MAIN, [_shared_block(plan, config.cluster)])]
    blocks = [_block(group, config.cluster) for group in plan.groups]
    engines = [block for block in blocks if block.name == "inference"]
    others = [block for block in blocks if block.name != "inference"]
    if config.launcher.target_name == "slurm_linked" and engines and others:
        return [Job(MAIN, others), Job("inference", engines)]
    return [Job(MAIN, blocks)]


def job_of(plan: RunPlan, unit: Unit) -> Job:
    """The job whose batch script starts the steps of `unit`."""
    return next(job for job in jobs(plan) if job.has(unit.group))


def script_name(job: Job) -> str:
    """Its file in the run directory."""
    return "job.sbatch" if job.name == MAIN else f"job.{job.name}.sbatch"


def check_allocation(plan: RunPlan, environment: Mapping[str, str]) -> None:
    """Compare the allocation around this process with the one that the plan needs.

    Raises:
        ConfigurationError: there is none, or it has other groups or too few nodes.
    """
    main, *others = jobs(plan)
    groups = int(environment.get("SLURM_HET_SIZE", 1 if "SLURM_JOB_ID" in environment else 0))
    if others or groups != len(main.blocks):
        expected = "true, since engines are a job of their own" if others else _wanted(len(main.blocks), groups)
        raise ConfigurationError([ConfigProblem("launcher.submit", False, expected)])
    problems = []
    for i, block in enumerate(main.blocks):
        suffix = f"_HET_GROUP_{i}" if groups > 1 else ""
        nodes = int(environment[f"SLURM_JOB_NUM_NODES{suffix}"])
        if nodes < block.nodes:
            problems.append(ConfigProblem(f"cluster.components.{block.name}.nodes", block.nodes,
                                          f"at most the {nodes} nodes of this allocation"))  # fmt: skip
    if problems:
        raise ConfigurationError(problems)


def _wanted(groups: int, here: int) -> str:
    """What `launcher.submit` must be in a job of `here` groups of nodes (0: in none), where the plan has `groups`."""
    kind = "a job of equal nodes" if groups == 1 else f"a heterogeneous job of {groups} groups"
    found = "and this process is in no job" if here == 0 else f"and this one has {here} group{'s' * (here != 1)}"
    return f"true; false is for a batch script that runs this command in {kind}, {found}"


def _block(group: NodeGroup, cluster: ClusterConfig) -> Block:
    resources = component(cluster, group.name)
    return Block(group.name, [group], group.nodes + group.spare, group.gpus, resources)


def _shared_block(plan: RunPlan, cluster: ClusterConfig) -> Block:
    """The nodes of all components as one block, described by the keys of the trainer, or of the only component."""
    names = [group.name for group in plan.groups]
    name = "trainer" if "trainer" in names else names[0]
    return Block(name, plan.groups, plan.nodes, max(group.gpus for group in plan.groups), component(cluster, name))
