"""The plan of an attempt: which process runs where, with which GPUs, files and environment."""

from pathlib import Path
from typing import Any

import msgspec

from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.errors import SchemaMismatch

PLAN_SCHEMA = 2
GUEST_OF = {"environment": "orchestrator", "router": "inference"}
"""Components without nodes of their own, and whose they share."""


class ProcessPlan(msgspec.Struct, kw_only=True):
    """One process. `component` is orchestrator, environment (workers beside it), inference, router or trainer.

    `index` counts engines, ranks or workers of a source; `rank` counts the nodes of one engine, of which the first
    answers requests; `frozen` names the model of an engine that does not serve the policy. `node` counts the nodes of
    the component's group, `gpus` are indices on that node.
    The command is run from any folder; `log` lies inside the run directory.
    """

    name: str
    component: str
    index: int
    node: int
    command: list[str]
    log: str
    rank: int = 0
    gpus: list[int] = []
    frozen: str | None = None
    env: dict[str, str] = {}


class NodeGroup(msgspec.Struct, kw_only=True):
    """The nodes of a component: `nodes` that processes are placed on, then `spare` ones, each with `gpus` GPUs.

    `first` is the number of its first node among all nodes of the run; groups that share nodes overlap there.
    """

    name: str
    first: int
    nodes: int
    gpus: int
    spare: int = 0

    @property
    def end(self) -> int:
        return self.first + self.nodes + self.spare


class Fork(msgspec.Struct, kw_only=True):
    """Lineage `lineage` started from the weights after `step`; versions of older lineages past it are abandoned."""

    lineage: int
    step: int


def read_forks(path: Path) -> list[Fork]:
    """The history of lineages in `forks.json`; none where there is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Fork]) if path.exists() else []


class RunPlan(msgspec.Struct, kw_only=True):
    """Everything a launcher and the roles need. `config` is the resolved configuration as a dictionary."""

    schema: int = PLAN_SCHEMA
    name: str
    run_dir: str
    attempt: int
    nodes: int
    groups: list[NodeGroup] = []
    forks: list[Fork]
    checkpoint: str | None
    processes: list[ProcessPlan]
    config: dict[str, Any]
    rewind: bool = False
    """The orchestrator's journal is cut back to the checkpoint, rather than gone on with."""

    def process(self, name: str) -> ProcessPlan:
        return next(p for p in self.processes if p.name == name)

    def of(self, component: str) -> list[ProcessPlan]:
        """Processes of a component, in order of index."""
        return [p for p in self.processes if p.component == component]

    def engines(self) -> list[ProcessPlan]:
        """The process of each of the policy's engines that answers requests."""
        return self.serving(None)

    def serving(self, frozen: str | None) -> list[ProcessPlan]:
        """The process of each engine of a frozen model, or of the policy (None), that answers requests."""
        return [p for p in self.of("inference") if p.rank == 0 and p.frozen == frozen]

    def group(self, process: ProcessPlan) -> NodeGroup:
        """The nodes among which `process` is placed; environment workers run beside the orchestrator."""
        name = GUEST_OF.get(process.component, process.component)
        return next(g for g in self.groups if g.name == name)

    @property
    def held_gpus(self) -> int:
        """GPUs that the run holds: on Slurm those of all its nodes, spares too; on this machine those in use."""
        if not self.typed_config().launcher.on_slurm:
            return len({gpu for process in self.processes for gpu in process.gpus})
        return sum(max(g.gpus for g in self.groups if g.first <= node < g.end) for node in range(self.nodes))

    def host(self, process: ProcessPlan) -> int:
        """The number of its node among all nodes of the run."""
        return self.group(process).first + process.node

    def shares_gpu(self, one: ProcessPlan, other: ProcessPlan) -> bool:
        """Whether two processes have a GPU in common."""
        return bool(set(one.gpus) & set(other.gpus)) and self.host(one) == self.host(other)

    def typed_config(self) -> RunConfig:
        return parse(self.config)

    def dump(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def load(path: Path) -> RunPlan:
    """Read a plan.

    Raises:
        SchemaMismatch: the plan was written by another version of this product.
    """
    data = path.read_bytes()
    schema = msgspec.json.decode(data).get("schema")
    if schema != PLAN_SCHEMA:
        raise SchemaMismatch(f"{path} has plan schema {schema!r}, this installation reads {PLAN_SCHEMA}")
    return msgspec.json.decode(data, type=RunPlan)
