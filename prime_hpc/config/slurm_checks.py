"""Checks of what is asked of Slurm: what sbatch would refuse, leave pending for ever, or silently hand on."""

import re
from collections.abc import Iterator

from prime_hpc.config.cluster import ComponentConfig, component
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import components_of, fits_one_node, inference_size, trainer_size
from prime_hpc.errors import ConfigProblem

TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>[0-5]?\d))?(?::(?P<third>[0-5]?\d))?")
MEMORY = re.compile(r"\d+[KMGT]?")
MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
GRES = re.compile(r"gpu(:[A-Za-z][\w.-]*)?")
OWN_OPTIONS = {
    "account": "account", "constraint": "constraint", "cpus-per-task": "cpus", "gpus-per-node": "gpus_per_node",
    "gres": "gres", "mem": "memory", "nodes": "nodes", "partition": "partition", "qos": "qos",
}  # fmt: skip
"""Options of sbatch that have a key of their own."""
FIXED_OPTIONS = ("array", "error", "hetjob", "job-name", "no-kill", "no-requeue", "ntasks", "ntasks-per-node",
                 "open-mode", "output", "requeue", "signal", "time")  # fmt: skip
"""Options of sbatch that follow from the run or from other keys of `cluster`."""
HANDED_ON = ("account", "qos", "memory")
"""Keys whose option Slurm hands from the first group of a heterogeneous job to the others."""


def find_slurm_conflicts(config: RunConfig) -> Iterator[ConfigProblem]:
    """Conflicts of a run whose plan is made for Slurm."""
    names = components_of(config)
    yield from _time(config)
    for name in names:
        own = component(config.cluster, name)
        yield from _formats(own, f"cluster.components.{name}")
        yield from _container(own, f"cluster.components.{name}.container")
    yield from _gpus(config, names)
    if not any(component(config.cluster, n).gpus_per_node is None for n in names if n != "orchestrator"):
        yield from _nodes(config, names)
    linked = config.launcher.target_name == "slurm_linked"
    together = [name for name in names if not (linked and name == "inference")]
    if config.launcher.target_name != "slurm_single" and len(together) > 1:
        yield from _groups(config, together)


def parse_time(text: str) -> int | None:
    """Seconds of a time limit as Slurm writes it (`man sbatch`, --time); None for anything else."""
    match = TIME.fullmatch(text)
    if match is None:
        return None
    first, second, third = (int(match[part] or 0) for part in ("first", "second", "third"))
    if match["days"] is None and match["third"] is None:
        return first * 60 + second
    return int(match["days"] or 0) * 86400 + first * 3600 + second * 60 + third


def mebibytes(memory: str) -> float:
    """MiB of an amount as Slurm writes it: a number with K, M, G or T, of MiB without."""
    unit = memory[-1] if memory[-1] in MEBIBYTES else "M"
    return float(memory.rstrip("KMGT")) * MEBIBYTES[unit]


def _time(config: RunConfig) -> Iterator[ConfigProblem]:
    limit, signal_s = config.cluster.time, config.cluster.signal_s
    if limit is None:
        return
    seconds = parse_time(limit)
    if not seconds:
        yield ConfigProblem("cluster.time", limit, "a time limit as Slurm writes it: 'MM', 'HH:MM:SS' or 'D-HH:MM:SS'")
    elif signal_s >= seconds:
        yield ConfigProblem("cluster.signal_s", signal_s, f"less than cluster.time = {limit!r}, which is {seconds} s")


def _formats(own: ComponentConfig, key: str) -> Iterator[ConfigProblem]:
    if own.memory is not None and not MEMORY.fullmatch(own.memory):
        yield ConfigProblem(f"{key}.memory", own.memory, "a number with K, M, G or T, e.g. 500G; 0 for all of a node")
    if own.gres is not None and not GRES.fullmatch(own.gres):
        yield ConfigProblem(f"{key}.gres", own.gres, "`gpu` or `gpu:TYPE`; the count is made from gpus_per_node")
    for option in own.directives:
        if option in OWN_OPTIONS:
            yield ConfigProblem(f"{key}.directives.{option}", own.directives[option],
                                f"to be left out: set {key}.{OWN_OPTIONS[option]}")  # fmt: skip
        elif option in FIXED_OPTIONS:
            yield ConfigProblem(f"{key}.directives.{option}", own.directives[option],
                                "to be left out: it follows from the run and from keys of `cluster`")  # fmt: skip
        elif not re.fullmatch(r"[a-z][a-z0-9-]+", option):
            yield ConfigProblem(f"{key}.directives.{option}", own.directives[option],
                                "a long option of sbatch without dashes in front, e.g. mail-type")  # fmt: skip


def _container(own: ComponentConfig, key: str) -> Iterator[ConfigProblem]:
    container = own.container
    if container.runtime in ("apptainer", "pyxis") and not container.image:
        yield ConfigProblem(f"{key}.image", container.image, f"an image, since {key}.runtime is {container.runtime}")
    if container.runtime in (None, "none") and container.image:
        yield ConfigProblem(f"{key}.runtime", container.runtime, "apptainer or pyxis, since there is an image")
    for mount in container.mounts or []:
        if not re.fullmatch(r"/[^:]*:/[^:]*(:\w+)?", mount):
            yield ConfigProblem(f"{key}.mounts", mount, "absolute folders as OUTSIDE:INSIDE")


def _gpus(config: RunConfig, names: list[str]) -> Iterator[ConfigProblem]:
    if config.cluster.components.orchestrator.gpus_per_node:
        yield ConfigProblem("cluster.components.orchestrator.gpus_per_node",
                            config.cluster.components.orchestrator.gpus_per_node,
                            "to be left out: neither orchestrator nor environments use a GPU")  # fmt: skip
    for name in names:
        gpus = component(config.cluster, name).gpus_per_node
        if name != "orchestrator" and gpus is None:
            yield ConfigProblem(f"cluster.components.{name}.gpus_per_node", None,
                                "GPUs of a node, here or as cluster.gpus_per_node; 0 for none")  # fmt: skip
        elif name == "trainer" and gpus == 0 and config.trainer.device == "cuda":
            yield ConfigProblem("trainer.device", "cuda", "nodes with GPUs; cluster.gpus_per_node is 0")


def _nodes(config: RunConfig, names: list[str]) -> Iterator[ConfigProblem]:
    parts = config.cluster.components
    if "orchestrator" in names and (parts.orchestrator.nodes or 1) > 1:
        yield ConfigProblem("cluster.components.orchestrator.nodes", parts.orchestrator.nodes, "1")
    if config.launcher.target_name == "slurm_single":
        yield from _equal_nodes(config, names)
        if fits_one_node(config):
            return
    if "inference" in names:
        yield from _inference_nodes(config)
    if "trainer" in names:
        yield from _trainer_nodes(config)
    if config.trainer.share_gpu and config.mode == "rl":
        yield ConfigProblem("trainer.share_gpu", True, "false, since components have nodes of their own; only "
                            "launcher=slurm_single with enough GPUs in one node can share")  # fmt: skip


def _equal_nodes(config: RunConfig, names: list[str]) -> Iterator[ConfigProblem]:
    gpus = {name: component(config.cluster, name).gpus_per_node for name in names if name != "orchestrator"}
    if len(set(gpus.values())) > 1:
        yield ConfigProblem("cluster.components.inference.gpus_per_node", gpus["inference"],
                            f"{gpus['trainer']} as for the trainer: slurm_single has nodes of one kind")  # fmt: skip


def _inference_nodes(config: RunConfig) -> Iterator[ConfigProblem]:
    size, available = inference_size(config), component(config.cluster, "inference").gpus_per_node
    if size.span > 1 and config.update.chosen == "delta":
        yield ConfigProblem("update.transport", "delta", "filesystem or nccl: engines on several nodes have no common "
                            "memory for a copy of the weights")  # fmt: skip
    if size.span > 1 and size.gpus != size.span * (available or 0):
        yield ConfigProblem("inference.gpus_per_replica", size.gpus,
                            f"a multiple of the {available} GPUs of a node, since it is more than one has")  # fmt: skip
    elif size.span > 1 and size.nodes != size.units * size.span:
        yield ConfigProblem("cluster.components.inference.nodes", size.nodes,
                            f"{size.units * size.span}: {size.units} engines of {size.gpus} GPUs on nodes of "
                            f"{available}")  # fmt: skip
    elif size.span == 1 and (size.nodes > size.units or size.node_gpus > (available or 0)):
        yield ConfigProblem("cluster.components.inference.nodes", size.nodes,
                            f"nodes for {size.units} engines of {size.gpus} GPUs, at most one each, with at most "
                            f"{available} GPUs")  # fmt: skip


def _trainer_nodes(config: RunConfig) -> Iterator[ConfigProblem]:
    size, available = trainer_size(config), component(config.cluster, "trainer").gpus_per_node
    if size.units != size.nodes * size.per_node or (size.gpus and size.per_node > (available or 0)):
        most = f" of at most {available} ranks" if size.gpus else ""
        yield ConfigProblem("trainer.ranks", size.units,
                            f"the same number of ranks on each of {size.nodes} nodes{most}")  # fmt: skip


def _groups(config: RunConfig, names: list[str]) -> Iterator[ConfigProblem]:
    """What the groups of one heterogeneous job must agree on."""
    yield from _spares(config, names)
    yield from _nodelists(config, names)
    for key in HANDED_ON:
        yield from _handed_on(config, names, key)


def _spares(config: RunConfig, names: list[str]) -> Iterator[ConfigProblem]:
    """A heterogeneous job outlives a failed node only if each of its groups has two or more."""
    spare = {name: getattr(config.cluster.components, name).spare_nodes for name in names}
    nodes = {"orchestrator": 1, "inference": inference_size(config).nodes, "trainer": trainer_size(config).nodes}
    for name in names if any(spare.values()) else ():
        if nodes[name] + spare[name] < 2:
            yield ConfigProblem(f"cluster.components.{name}.spare_nodes", 0,
                                "at least 1: Slurm keeps a job only if each group could lose a node")  # fmt: skip


def _nodelists(config: RunConfig, names: list[str]) -> Iterator[ConfigProblem]:
    """Groups that need the same node wait for ever."""
    taken: dict[object, str] = {}
    for name in names:
        wanted = component(config.cluster, name).directives.get("nodelist")
        if wanted is not None and wanted in taken:
            yield ConfigProblem(f"cluster.components.{name}.directives.nodelist", wanted,
                                f"other nodes than {taken[wanted]}: groups of a job share none")  # fmt: skip
        taken.setdefault(wanted, name)


def _handed_on(config: RunConfig, names: list[str], key: str) -> Iterator[ConfigProblem]:
    first, *others = names
    if getattr(component(config.cluster, first), key) is None:
        return
    for name in others:
        if getattr(component(config.cluster, name), key) is None:
            yield ConfigProblem(f"cluster.components.{name}.{key}", None,
                                f"a value, since Slurm would hand on that of {first}")  # fmt: skip
