"""Who runs where: nodes of each component, and node and GPUs of each engine and trainer rank. Pure functions."""

from dataclasses import dataclass

from prime_hpc.config.cluster import component
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import (
    Size,
    components_of,
    engine_models,
    fits_one_node,
    gpus_per_replica,
    inference_size,
    trainer_ranks,
    trainer_size,
)
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.plan.run_plan import NodeGroup

ORCHESTRATOR_SIZE = Size(units=1, nodes=1, gpus=0)


@dataclass(frozen=True)
class Slot:
    """A node of a component's group, and GPUs on it."""

    node: int
    gpus: list[int]


@dataclass(frozen=True)
class Placement:
    """The groups of nodes, the slots of each engine (one for each of its nodes), and the slot of each trainer rank."""

    groups: list[NodeGroup]
    engines: list[list[Slot]]
    ranks: list[Slot]


def place(config: RunConfig, gpus: int) -> Placement:
    """Place a run: on this machine with `gpus` GPUs, or on as many nodes of Slurm as it needs.

    Raises:
        ConfigurationError: one node has too few GPUs.
    """
    if not config.launcher.on_slurm:
        return _on_one_node(config, gpus)
    if config.launcher.target_name == "slurm_single" and fits_one_node(config):
        return _on_one_node(config, component(config.cluster, "trainer").gpus_per_node or 0)
    return _on_several_nodes(config)


def place_gpus(config: RunConfig, gpus: int) -> tuple[list[list[int]], list[list[int]]]:
    """GPU indices of each engine and each trainer rank on one node with `gpus` GPUs.

    Engines come first, ranks after them or, shared, beside them.
    """
    replicas, processes = len(engine_models(config)), trainer_ranks(config)
    present = components_of(config)
    ranks = processes if "trainer" in present and config.trainer.device != "cpu" else 0
    if gpus == 0:
        _refuse_cuda(config)
        return [[]] * replicas, [[]] * processes
    per_replica = gpus_per_replica(config)
    engines = replicas * per_replica if "inference" in present else 0
    shared = config.trainer.share_gpu
    if shared is None:
        shared = engines + ranks > gpus
    first_rank = 0 if shared else engines
    if max(engines, first_rank + ranks) > gpus:
        raise ConfigurationError([ConfigProblem("trainer.ranks", processes,
            f"at most {gpus} GPUs for {engines} of inference and {ranks} of the trainer"
            f"{' on the same GPUs' if shared else ''}")])  # fmt: skip
    inference = [list(range(i * per_replica, (i + 1) * per_replica)) for i in range(replicas)]
    return inference, [[first_rank + r] if ranks else [] for r in range(processes)]


def _on_one_node(config: RunConfig, gpus: int) -> Placement:
    inference, ranks = place_gpus(config, gpus)
    spare = config.cluster.components.trainer.spare_nodes if config.launcher.on_slurm else 0
    groups = [NodeGroup(name=name, first=0, nodes=1, gpus=gpus, spare=spare) for name in components_of(config)]
    return Placement(groups, [[Slot(0, gpus)] for gpus in inference], [Slot(0, gpus) for gpus in ranks])


def _on_several_nodes(config: RunConfig) -> Placement:
    sizes = {"orchestrator": ORCHESTRATOR_SIZE, "inference": inference_size(config), "trainer": trainer_size(config)}
    engines, ranks = sizes["inference"], sizes["trainer"]
    return Placement(
        groups=_groups(config, {name: sizes[name] for name in components_of(config)}),
        engines=[_engine(engines, i) for i in range(engines.units)],
        ranks=[_rank(ranks, r) for r in range(ranks.units)],
    )


def _groups(config: RunConfig, sizes: dict[str, Size]) -> list[NodeGroup]:
    """Groups one after the other; in an allocation of equal nodes the orchestrator is a guest of the first one."""
    single = config.launcher.target_name == "slurm_single"
    most = max(size.node_gpus for size in sizes.values())
    groups, first = [], 0
    for name, size in sizes.items():
        guest = single and name == "orchestrator"
        spare = 0 if guest else getattr(config.cluster.components, name).spare_nodes
        gpus = most if single else size.node_gpus
        groups.append(NodeGroup(name=name, first=first, nodes=size.nodes, gpus=gpus, spare=spare))
        first = first if guest else groups[-1].end
    return groups


def _engine(size: Size, index: int) -> list[Slot]:
    if size.span > 1:
        return [Slot(index * size.span + i, list(range(size.gpus // size.span))) for i in range(size.span)]
    node, place = divmod(index, size.per_node)
    return [Slot(node, list(range(place * size.gpus, (place + 1) * size.gpus)))]


def _rank(size: Size, rank: int) -> Slot:
    node, place = divmod(rank, size.per_node)
    return Slot(node, [place] if size.gpus else [])


def _refuse_cuda(config: RunConfig) -> None:
    if config.trainer.device == "cuda" or config.inference.gpus_per_replica:
        key = "trainer.device" if config.trainer.device == "cuda" else "inference.gpus_per_replica"
        raise ConfigurationError([ConfigProblem(key, "cuda", "a machine with a GPU; this one has none")])
