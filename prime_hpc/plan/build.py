"""From a configuration to a plan: a pure function, and the only place where placement is decided."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.checks import source_name
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.plan.run_plan import Fork, ProcessPlan, RunPlan

BASE_ENV = {
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What distinguishes this start of a run: its number, where it resumes, and the forks of its history."""

    number: int = 1
    checkpoint: Path | None = None
    forks: list[Fork] = field(default_factory=list)


def build_plan(config: RunConfig, run_dir: Path, attempt: Attempt, gpus: int) -> RunPlan:
    """Place every process of a run on one node with `gpus` GPUs.

    Raises:
        ConfigurationError: the run needs more GPUs than there are.
    """
    inference_gpus, trainer_gpus = place_gpus(config, gpus)
    processes = [*_trainer(config, trainer_gpus)]
    if config.mode == "rl":
        processes = [*_orchestrator(), *_environments(config), *_inference(config, inference_gpus), *processes]
    paths = RunPaths(run_dir)
    for process in processes:
        process.command += [str(paths.plan), "--process", process.name]
        process.log = str(paths.logs(attempt.number) / f"{process.name}.log")
        process.env = {**BASE_ENV, **config.cluster.env, **process.env}
    return RunPlan(
        name=run_dir.name,
        run_dir=str(run_dir),
        attempt=attempt.number,
        nodes=1,
        forks=attempt.forks,
        checkpoint=str(attempt.checkpoint) if attempt.checkpoint else None,
        processes=processes,
        config=to_dict(config),
    )


def place_gpus(config: RunConfig, gpus: int) -> tuple[list[list[int]], list[list[int]]]:
    """GPU indices of each engine and of each trainer rank: engines first, ranks after them or, shared, beside them."""
    ranks = 0 if config.trainer.device == "cpu" else config.trainer.ranks
    if gpus == 0:
        _refuse_cuda(config)
        return [[]] * config.inference.replicas, [[]] * config.trainer.ranks
    per_replica = _gpus_per_replica(config)
    engines = config.inference.replicas * per_replica if config.mode == "rl" else 0
    shared = config.trainer.share_gpu
    if shared is None:
        shared = engines + ranks > gpus
    first_rank = 0 if shared else engines
    if max(engines, first_rank + ranks) > gpus:
        raise ConfigurationError([ConfigProblem("trainer.ranks", config.trainer.ranks,
            f"at most {gpus} GPUs for {engines} of inference and {ranks} of the trainer"
            f"{' on the same GPUs' if shared else ''}")])  # fmt: skip
    inference = [list(range(i * per_replica, (i + 1) * per_replica)) for i in range(config.inference.replicas)]
    return inference, [[first_rank + r] if ranks else [] for r in range(config.trainer.ranks)]


def _gpus_per_replica(config: RunConfig) -> int:
    if config.inference.gpus_per_replica is not None:
        return config.inference.gpus_per_replica
    vllm = config.inference.vllm
    return int(vllm.get("tensor_parallel_size", 1)) * int(vllm.get("data_parallel_size", 1))


def _refuse_cuda(config: RunConfig) -> None:
    if config.trainer.device == "cuda" or config.inference.gpus_per_replica:
        key = "trainer.device" if config.trainer.device == "cuda" else "inference.gpus_per_replica"
        raise ConfigurationError([ConfigProblem(key, "cuda", "a machine with a GPU; this one has none")])


def _process(name: str, component: str, index: int, module: str, gpus: list[int] | None = None) -> ProcessPlan:
    command = [sys.executable, "-m", module]
    return ProcessPlan(name=name, component=component, index=index, node=0, command=command, log="", gpus=gpus or [])


def _orchestrator() -> Iterator[ProcessPlan]:
    yield _process("orchestrator-0", "orchestrator", 0, "prime_hpc.orchestrator")


def _environments(config: RunConfig) -> Iterator[ProcessPlan]:
    sources = [(s, "train", config.env.workers) for s in config.env.train]
    sources += [(s, "eval", 1) for s in config.env.eval.sources]
    for source, kind, workers in sources:
        for i in range(workers):
            name = source_name(source)
            process = _process(f"env-{name}-{i}", "environment", i, "prime_hpc.envs")
            process.env = {"PRIME_HPC_SOURCE": name, "PRIME_HPC_SOURCE_KIND": kind}
            yield process


def _inference(config: RunConfig, gpus: list[list[int]]) -> Iterator[ProcessPlan]:
    for i in range(config.inference.replicas):
        process = _process(f"inference-{i}", "inference", i, config.inference.engine, gpus[i])
        process.env = dict(config.inference.env)
        yield process


def _trainer(config: RunConfig, gpus: list[list[int]]) -> Iterator[ProcessPlan]:
    for rank in range(config.trainer.ranks):
        process = _process(f"trainer-{rank}", "trainer", rank, "prime_hpc.trainer", gpus[rank])
        process.env = dict(config.trainer.env)
        yield process
