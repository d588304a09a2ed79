"""The plan of an attempt: which process runs where, with which GPUs, files and environment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.errors import SchemaMismatch

PLAN_SCHEMA = 1


class ProcessPlan(msgspec.Struct, kw_only=True):
    """One process. `component` is orchestrator, environment (workers beside it), inference or trainer.

    Its command is run from any folder; `gpus` are indices on its node; `log` lies inside the run directory.
    """

    name: str
    component: str
    index: int
    node: int
    command: list[str]
    log: str
    gpus: list[int] = []
    env: dict[str, str] = {}


class Fork(msgspec.Struct, kw_only=True):
    """Lineage `lineage` started from the weights after `step`; versions of older lineages past it are abandoned."""

    lineage: int
    step: int


def read_forks(path: Path) -> list[Fork]:
    """The history of lineages in `forks.json`; none where there is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Fork]) if path.exists() else []


@dataclass(frozen=True)
class Unit:
    """Processes that live and die together: an engine, an environment worker, the orchestrator, all trainer ranks."""

    name: str
    component: str
    processes: list[ProcessPlan]


class RunPlan(msgspec.Struct, kw_only=True):
    """Everything a launcher and the roles need. `config` is the resolved configuration as a dictionary."""

    schema: int = PLAN_SCHEMA
    name: str
    run_dir: str
    attempt: int
    nodes: int
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

    def units(self) -> list[Unit]:
        """The restart units, in order of the plan."""
        units: dict[str, Unit] = {}
        for process in self.processes:
            name = "trainer" if process.component == "trainer" else process.name
            units.setdefault(name, Unit(name, process.component, [])).processes.append(process)
        return list(units.values())

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
