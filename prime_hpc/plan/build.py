"""From a configuration to a plan: a pure function, and the only place where processes are decided."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.checks import source_name
from prime_hpc.config.cluster import component
from prime_hpc.config.env import TaskSource
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.config.sizes import components_of, engine_models
from prime_hpc.plan.placement import Placement, Slot, place
from prime_hpc.plan.run_plan import GUEST_OF, Fork, ProcessPlan, RunPlan
from prime_hpc.plan.transport import settle_transport

BASE_ENV = {
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait take the cores from the processes beside them
}
FIRST_NODE = Slot(0, [])
ROUTERS = {"builtin": "prime_hpc.inference.router", "vllm": "prime_hpc.inference.vllm_router"}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What distinguishes this start of a run: its number, where it resumes, the forks of its history, and whether the
    orchestrator's journal goes back to the checkpoint too."""

    number: int = 1
    checkpoint: Path | None = None
    forks: list[Fork] = field(default_factory=list)
    rewind: bool = False


def build_plan(config: RunConfig, run_dir: Path, attempt: Attempt, gpus: int) -> RunPlan:
    """Place every process of a run: on this machine with `gpus` GPUs, or on nodes of Slurm.

    Raises:
        ConfigurationError: the run needs more GPUs than there are, or weights cannot travel as they are to.
    """
    placement = place(config, gpus)
    processes = list(_processes(config, placement))
    paths = RunPaths(run_dir)
    for process in processes:
        process.command += [str(paths.plan), "--process", process.name]
        process.log = str(paths.logs(attempt.number) / f"{process.name}.log")
        process.env = {**BASE_ENV, **config.cluster.env, **process.env}
    plan = RunPlan(
        name=run_dir.name,
        run_dir=str(run_dir),
        attempt=attempt.number,
        nodes=max(group.end for group in placement.groups),
        groups=placement.groups,
        forks=attempt.forks,
        checkpoint=str(attempt.checkpoint) if attempt.checkpoint else None,
        processes=processes,
        rewind=attempt.rewind,
        config=to_dict(config),
    )
    settle_transport(config, plan)
    return plan


def host_python(config: RunConfig) -> str:
    """The Python of the nodes: this process's own on one machine."""
    return (config.launcher.on_slurm and config.cluster.python) or sys.executable


def interpreter(config: RunConfig, name: str) -> str:
    """The Python of a component's processes: that of the nodes, or of the image they run in."""
    container = component(config.cluster, name).container
    if config.launcher.on_slurm and container.runtime in ("apptainer", "pyxis"):
        return container.python or "python3"
    return host_python(config)


def _processes(config: RunConfig, placement: Placement) -> Iterator[ProcessPlan]:
    if config.mode in ("rl", "sample"):
        yield _process(config, "orchestrator-0", "orchestrator", 0, "prime_hpc.orchestrator", FIRST_NODE)
        yield from _environments(config)
    if config.mode == "bench_inference":
        yield _process(config, "orchestrator-0", "orchestrator", 0, "prime_hpc.orchestrator", FIRST_NODE)
    if "inference" in components_of(config):
        yield from _inference(config, placement)
        if router := ROUTERS.get(config.inference.router):
            yield _process(config, "router-0", "router", 0, router, FIRST_NODE)
    if "trainer" in components_of(config):
        yield from _trainer(config, placement)


def _process(config: RunConfig, name: str, component: str, index: int, module: str, slot: Slot) -> ProcessPlan:
    python = interpreter(config, GUEST_OF.get(component, component))
    return ProcessPlan(name=name, component=component, index=index, node=slot.node, command=[python, "-m", module],
                       log="", gpus=slot.gpus)  # fmt: skip


def _environments(config: RunConfig) -> Iterator[ProcessPlan]:
    sources: list[tuple[TaskSource, str, int]] = [(s, "train", config.env.workers) for s in config.env.train]
    evaluators = config.env.workers if config.evaluates_alone else 1
    sources += [(s, "eval", evaluators) for s in config.env.eval.sources]
    for source, kind, workers in sources:
        for i in range(workers):
            name = source_name(source)
            process = _process(config, f"env-{name}-{i}", "environment", i, "prime_hpc.envs", FIRST_NODE)
            process.env = {"PRIME_HPC_SOURCE": name, "PRIME_HPC_SOURCE_KIND": kind}
            yield process


def _inference(config: RunConfig, placement: Placement) -> Iterator[ProcessPlan]:
    for i, (slots, frozen) in enumerate(zip(placement.engines, engine_models(config), strict=True)):
        for rank, slot in enumerate(slots):
            name = f"inference-{i}" if rank == 0 else f"inference-{i}-node-{rank}"
            process = _process(config, name, "inference", i, config.inference.engine, slot)
            process.rank, process.frozen, process.env = rank, frozen, dict(config.inference.env)
            yield process


def _trainer(config: RunConfig, placement: Placement) -> Iterator[ProcessPlan]:
    for rank, slot in enumerate(placement.ranks):
        process = _process(config, f"trainer-{rank}", "trainer", rank, "prime_hpc.trainer", slot)
        process.env = dict(config.trainer.env)
        yield process
