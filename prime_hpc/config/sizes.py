"""How many: nodes, processes and GPUs of each component, from what the configuration gives and what follows from it."""

from dataclasses import dataclass
from math import ceil

from prime_hpc.config.cluster import COMPONENTS, component
from prime_hpc.config.run import RunConfig


@dataclass(frozen=True)
class Size:
    """`units` engines or ranks with `gpus` GPUs each on `nodes` nodes: `per_node` of them on a node or, where one needs
    several, each on `span` whole nodes."""

    units: int
    nodes: int
    gpus: int
    per_node: int = 1
    span: int = 1

    @property
    def node_gpus(self) -> int:
        """GPUs that are used on a node."""
        return self.gpus // self.span * self.per_node


def components_of(config: RunConfig) -> list[str]:
    """Components that have nodes, in the order of a job's groups."""
    present = {
        "rl": ("orchestrator", "inference", "trainer"),
        "sft": ("trainer",),
        "replay": ("trainer",),
        "sample": ("orchestrator", "inference"),
        "serve": ("inference",),
        "bench": ("trainer",),
        "bench_inference": ("orchestrator", "inference"),
    }
    absent = set() if engine_models(config) else {"inference"}
    return [name for name in COMPONENTS if name in present[config.mode] and name not in absent]


def gpus_per_replica(config: RunConfig) -> int:
    """GPUs of one engine where there are GPUs."""
    given = config.inference.gpus_per_replica
    return engine_gpus(config) if given is None else given


def engine_gpus(config: RunConfig) -> int:
    """GPUs that the parallel sizes of vLLM ask for."""
    sizes = (f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data"))
    tensor, pipeline, data = (int(config.inference.vllm.get(name, 1)) for name in sizes)
    return tensor * pipeline * data


def engine_models(config: RunConfig) -> list[str | None]:
    """What each engine of the run itself serves: the policy (None), or a frozen model by name."""
    frozen = [name for name, model in config.frozen.items() for _ in range(model.replicas) if model.path]
    return [None] * (0 if config.inference.attach.on else config.inference.replicas) + frozen


def trainer_ranks(config: RunConfig) -> int:
    """Trainer processes: what is given, else every GPU of the trainer's nodes under Slurm, else 1."""
    if config.trainer.ranks is not None:
        return config.trainer.ranks
    nodes = config.cluster.components.trainer.nodes or 1
    return nodes * max(1, _trainer_gpus(config)) if config.launcher.on_slurm else 1


def rows_at_once(config: RunConfig) -> int:
    """Packed rows that the trainer's ranks compute at a time, each on cp * tp of them."""
    parallel = config.trainer.parallel
    return max(1, trainer_ranks(config) // (parallel.cp * parallel.tp))


def inference_size(config: RunConfig) -> Size:
    """Engines on nodes of Slurm: several on a node, or one on several nodes; without GPUs spread evenly."""
    replicas, nodes = len(engine_models(config)), config.cluster.components.inference.nodes
    available = component(config.cluster, "inference").gpus_per_node or 0
    gpus = gpus_per_replica(config) if available else 0
    if gpus > available:
        span = ceil(gpus / available)
        return Size(replicas, nodes or replicas * span, gpus, span=span)
    nodes = nodes or (max(1, ceil(replicas / (available // gpus))) if gpus else 1)
    return Size(replicas, nodes, gpus, per_node=ceil(replicas / nodes))


def trainer_size(config: RunConfig) -> Size:
    """Trainer ranks on nodes of Slurm, one GPU each where there are GPUs."""
    ranks, available = trainer_ranks(config), _trainer_gpus(config)
    nodes = config.cluster.components.trainer.nodes or (ceil(ranks / available) if available else 1)
    return Size(ranks, nodes, gpus=1 if available else 0, per_node=ceil(ranks / nodes))


def fits_one_node(config: RunConfig) -> bool:
    """Whether slurm_single places a run as one machine would: nobody asked for nodes, and one has the GPUs for all."""
    parts = config.cluster.components
    if config.mode != "rl" or parts.inference.nodes or parts.trainer.nodes:
        return False
    engines, ranks = inference_size(config), trainer_size(config)
    needed = [engines.units * engines.gpus, ranks.units * ranks.gpus]
    together = max(needed) if config.trainer.share_gpu else sum(needed)
    return together <= (component(config.cluster, "trainer").gpus_per_node or 0)


def _trainer_gpus(config: RunConfig) -> int:
    """GPUs of a node that the trainer may use."""
    return 0 if config.trainer.device == "cpu" else component(config.cluster, "trainer").gpus_per_node or 0
