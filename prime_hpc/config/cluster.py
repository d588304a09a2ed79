"""Configuration of the machines: what each component asks of Slurm, and what a site adds to its jobs."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from prime_hpc.config.sections import FORBID_UNKNOWN, NonNegative, Positive, Seconds, UserFile

COMPONENTS = ("orchestrator", "inference", "trainer")
"""Groups of nodes, in the order in which a heterogeneous job has them: the batch script runs in the first, which must
have no GPU, since Slurm hands the GPU variables of the first group on to the steps of all others."""

Section = TypeVar("Section", "ComponentConfig", "ContainerConfig")


@dataclass(kw_only=True)
class ContainerConfig:
    """The image in which processes run."""

    __pydantic_config__ = FORBID_UNKNOWN

    runtime: Literal["none", "apptainer", "pyxis"] | None = None
    """none: straight on the node. apptainer: `apptainer exec` inside the step. pyxis: `srun --container-image`."""
    image: UserFile | None = None
    """Image file, or a name that the runtime can pull."""
    python: str | None = None
    """Interpreter inside the image that has this product installed; `python3` when left out."""
    mounts: list[str] | None = None
    """Folders as `OUTSIDE:INSIDE`; the run's and the model's directory are mounted anyway."""
    args: list[str] | None = None
    """Further arguments of `apptainer exec`, or of srun for pyxis."""


@dataclass(kw_only=True)
class AllocationConfig:
    """What is asked of Slurm for every node of a component."""

    __pydantic_config__ = FORBID_UNKNOWN

    partition: str | None = None
    """Partition; the cluster's default one when left out."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have, e.g. `h200`."""
    gpus_per_node: NonNegative | None = None
    """GPUs of a node. On this machine they are found out; under Slurm they must be given, 0 for none."""
    gpu: str | None = None
    """Name of the GPUs, e.g. `H200`, for estimates of memory and time; by default that in `gres` or `constraint`."""
    gres: str | None = None
    """`gpu` or `gpu:TYPE`, where GPUs are asked for by --gres and not by --gpus-per-node; the count is added."""
    cpus: Positive | None = None
    """CPU cores of a node."""
    memory: str | None = None
    """Memory of a node, e.g. `500G`; `0` is all of it."""
    directives: dict[str, str | int | bool | None] = field(default_factory=dict)
    """Further #SBATCH lines by long option, e.g. `mail-type: END`; true is an option without a value."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """The image in which processes run."""


@dataclass(kw_only=True)
class ComponentConfig(AllocationConfig):
    """Nodes of one component. What is left out is taken from `cluster`."""

    nodes: Positive | None = None
    """Nodes; as many as its processes need when left out."""
    spare_nodes: NonNegative = 0
    """Nodes beyond those, for processes whose node fails. With spares a failed node does not end the job."""


@dataclass(kw_only=True)
class ComponentsConfig:
    """What differs between components: the orchestrator with the environment workers, on one node without GPUs; the
    engines; the trainer, whose keys describe the whole allocation of slurm_single."""

    __pydantic_config__ = FORBID_UNKNOWN

    orchestrator: ComponentConfig = field(default_factory=ComponentConfig)
    """The orchestrator and the environment workers."""
    inference: ComponentConfig = field(default_factory=ComponentConfig)
    """Engines."""
    trainer: ComponentConfig = field(default_factory=ComponentConfig)
    """Trainer ranks."""


@dataclass(kw_only=True)
class ClusterConfig(AllocationConfig):
    """The machines. Keys that a component has too hold for every component that does not set them."""

    time: Annotated[str, Field(coerce_numbers_to_str=False)] | None = None
    """Time limit as Slurm writes it: `MM`, `HH:MM:SS` or `D-HH:MM:SS`, in quotes in a YAML file."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before anything starts: modules, variables, a virtual environment."""
    python: UserFile | None = None
    """Interpreter on the nodes; the launcher's own when left out."""
    requeue: bool = True
    """Let Slurm start the job again: after a node failure, preemption, the time limit. With false a run outlives its
    time limit in a successor."""
    signal_s: Positive = 300
    """Seconds before the time limit at which the batch script is told."""
    components: ComponentsConfig = field(default_factory=ComponentsConfig)
    """What differs between components."""
    lease_s: Seconds = 30.0
    """A process that sees no sign of its supervisor for this long leaves by itself."""
    start_timeout_s: Seconds = 600.0
    """Deadline for every process to come up."""
    scratch: str | None = None
    """Folder on every node's own disk, e.g. `$TMPDIR`, to which one process a node copies the model before engines and
    trainer ranks load it; by default all read it where it lies."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for every process. Never secrets: they are written to the plan."""


def component(cluster: ClusterConfig, name: str) -> ComponentConfig:
    """The keys of a component, those that it leaves out taken from `cluster`."""
    own: ComponentConfig = getattr(cluster.components, name)
    merged = _inherit(own, cluster)
    return replace(merged, directives={**cluster.directives, **own.directives},
                   container=_inherit(own.container, cluster.container))  # fmt: skip


def _inherit(own: Section, base: object) -> Section:
    """`own` with every key that is None taken from `base`, where `base` has it."""
    missing = [f.name for f in fields(own) if getattr(own, f.name) is None and hasattr(base, f.name)]
    return replace(own, **{name: getattr(base, name) for name in missing})
