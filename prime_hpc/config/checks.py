"""Checks across fields: combinations that the types allow and a run does not survive. None needs torch or a GPU."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.config.algorithm import OPD, OPSD, AlgorithmConfig, CustomAlgorithm, Distillation
from prime_hpc.config.curriculum import DifficultyPools
from prime_hpc.config.engine_checks import find_argument_problems
from prime_hpc.config.env import SamplingConfig, SourceConfig, TaskSource
from prime_hpc.config.fleet_checks import find_fleet_problems
from prime_hpc.config.frozen_checks import find_frozen_problems
from prime_hpc.config.loss import CustomLoss, ImportanceLoss, PolicyGradient
from prime_hpc.config.model_checks import find_folder_problems
from prime_hpc.config.renderer import find_renderer_problems
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sampling_checks import find_sampling_problems, reshapes
from prime_hpc.config.sft_checks import find_sft_problems
from prime_hpc.config.sizes import components_of, engine_gpus, trainer_ranks
from prime_hpc.config.slurm_checks import find_slurm_conflicts
from prime_hpc.config.vllm_arguments import find_unknown_arguments
from prime_hpc.errors import ConfigProblem, nearest_name

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""
ADDRESS_ARGUMENTS = ("host", "port", "uds")
PLAN_ARGUMENTS = ("nnodes", "node_rank", "master_addr", "master_port", "headless", "api_server_count",
                  "data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank",
                  "data_parallel_address", "data_parallel_rpc_port")  # fmt: skip
"""Arguments of vLLM that follow from where an engine lies."""


def find_conflicts(config: RunConfig) -> list[ConfigProblem]:
    """Every conflict in a configuration that has passed the schema."""
    engines = (_engines, find_argument_problems, find_unknown_arguments, find_fleet_problems)
    sampled = (_functions, _sources, _adapters, find_sampling_problems, find_renderer_problems, *engines, _teachers,
               find_frozen_problems)  # fmt: skip
    by_mode = {
        "rl": (_rollouts, _loss, *sampled),
        "sft": (find_sft_problems, _rows, find_renderer_problems),
        "sample": (_rollouts, *sampled),
        "replay": (_loss, _replay),
        "serve": engines,
        "bench": (_bench,),
        "bench_inference": (*engines, _bench_inference),
    }
    slurm = (find_slurm_conflicts,) if config.launcher.on_slurm else ()
    checks = [
        find_folder_problems,
        _start_from,
        _scratch,
        _guard,
        _optimizer,
        _lora,
        _fp8,
        _ep_dispatch,
        _profile,
        *by_mode[config.mode],
        *slurm,
    ]
    return [problem for check in checks for problem in check(config)]


def _start_from(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.start_from.path is not None and config.mode not in ("rl", "sft", "replay"):
        expected = f"null, since mode={config.mode} trains no weights; modes that do: rl, sft, replay"
        yield ConfigProblem("start_from.path", config.start_from.path, expected)


def _guard(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.guard and config.mode in ("serve", "bench", "bench_inference"):
        yield ConfigProblem("guard", list(config.guard), f"no limit, since mode={config.mode} writes no metrics")
        return
    for metric, limit in config.guard.items():
        if limit is None:
            continue
        possible = {"rl": ("warn", "pause", "stop"), "sample": ("warn", "pause", "stop"), "sft": ("warn", "stop")}
        actions = possible.get(config.mode, ("warn",))
        if limit.action not in actions:
            expected = f"{' or '.join(actions)}, which is all that mode={config.mode} can do"
            yield ConfigProblem(f"guard.{metric}.action", limit.action, expected)
        if limit.above is not None and limit.below is not None and limit.below >= limit.above:
            yield ConfigProblem(f"guard.{metric}.below", limit.below, f"less than above = {limit.above:g}")


def _scratch(config: RunConfig) -> Iterator[ConfigProblem]:
    folder = config.cluster.scratch
    if folder is not None and not folder.startswith(("/", "$")):
        yield ConfigProblem("cluster.scratch", folder, "an absolute folder, or a variable that holds one as in $TMPDIR")


def _optimizer(config: RunConfig) -> Iterator[ConfigProblem]:
    optimizer = config.optimizer
    if optimizer.schedule == "wsd" and not optimizer.decay_steps:
        yield ConfigProblem("optimizer.decay_steps", 0, "steps of decay, since optimizer.schedule=wsd")
    if optimizer.min_lr > optimizer.lr:
        yield ConfigProblem("optimizer.min_lr", optimizer.min_lr, f"at most optimizer.lr = {optimizer.lr}")


def _lora(config: RunConfig) -> Iterator[ConfigProblem]:
    lora = config.lora
    if not lora.on:
        return
    if not lora.adapters or len(set(lora.adapters)) < len(lora.adapters):
        yield ConfigProblem("lora.adapters", lora.adapters, "at least one name, and none twice")
    if len(lora.adapters) > 1 and lora.serve == "merged":
        yield ConfigProblem("lora.serve", "merged", "adapter, since weights can hold only one of several adapters")
    if len(lora.adapters) > 1 and config.mode == "sft":
        yield ConfigProblem("lora.adapters", lora.adapters, "one, since mode=sft has one stream of rows")
    if lora.rank > max(VLLM_LORA_RANKS) and lora.served:
        yield ConfigProblem("lora.rank", lora.rank, f"at most {max(VLLM_LORA_RANKS)}, or lora.serve=merged")
    if config.trainer.router_bias_rate and lora.served:
        yield ConfigProblem("trainer.router_bias_rate", config.trainer.router_bias_rate,
                            "0, since the engines get adapters only; or lora.serve=merged")  # fmt: skip


def _adapters(config: RunConfig) -> Iterator[ConfigProblem]:
    for key, source in _all_sources(config):
        if source.adapter is not None and source.adapter not in (config.lora.adapters if config.lora.on else []):
            yield ConfigProblem(f"{key}.adapter", source.adapter, "a name of lora.adapters, with lora.rank above 0",
                                nearest_name(source.adapter, config.lora.adapters))  # fmt: skip
    if len(config.lora.served) > 1:
        unused = {*config.lora.adapters} - {source_adapter(config, source) for source in config.env.train}
        for adapter in sorted(unused):
            yield ConfigProblem("lora.adapters", adapter, "an adapter that a training source names")


def _rollouts(config: RunConfig) -> Iterator[ConfigProblem]:
    yield from _groups(config)
    if config.pause.max_s >= config.trainer.batch_timeout_s:
        yield ConfigProblem("pause.max_s", config.pause.max_s,
                            f"less than trainer.batch_timeout_s = {config.trainer.batch_timeout_s:.0f}")  # fmt: skip
    yield from _rows(config)


def _rows(config: RunConfig) -> Iterator[ConfigProblem]:
    row = config.trainer.micro_batch_tokens
    if row is not None and row < config.seq_len:
        yield ConfigProblem("trainer.micro_batch_tokens", row, f"at least seq_len = {config.seq_len}")


def _groups(config: RunConfig) -> Iterator[ConfigProblem]:
    orchestrator = config.orchestrator
    for key, (size, algorithms) in _sizes(config).items():
        comparing = [algorithm.name for algorithm in algorithms if algorithm.compares_group]
        if size == 1 and comparing:
            yield ConfigProblem(key, 1, f"at least 2: algorithm={comparing[0]} compares a group")
        if orchestrator.batch_size % size:
            yield ConfigProblem("orchestrator.batch_size", orchestrator.batch_size, f"a multiple of {key} = {size}")
        if isinstance(orchestrator.max_inflight, int) and orchestrator.max_inflight < size:
            yield ConfigProblem("orchestrator.max_inflight", orchestrator.max_inflight, f"at least {key} = {size}")


def _sizes(config: RunConfig) -> dict[str, tuple[int, list[AlgorithmConfig]]]:
    """Size of a group by the key that says it, and the algorithms of the sources that have it."""
    sizes: dict[str, tuple[int, list[AlgorithmConfig]]] = {}
    for i, source in enumerate(config.env.train):
        key = f"env.train.{i}.group_size" if source.group_size else "orchestrator.group_size"
        _, algorithms = sizes.setdefault(key, (own_group_size(config, source), []))
        algorithms.append(source.algorithm or config.algorithm)
    return sizes or {"orchestrator.group_size": (config.orchestrator.group_size, [config.algorithm])}


def _loss(config: RunConfig) -> Iterator[ConfigProblem]:
    loss = config.loss
    if isinstance(loss, CustomLoss):
        return
    if loss.normalise == "length" and loss.length is None:
        yield ConfigProblem("loss.length", None, "tokens that every sequence counts for, since loss.normalise=length")
    if loss.ref_tau and loss.reference not in config.frozen:
        yield ConfigProblem("loss.reference", loss.reference, "the name of a model under `frozen`, as loss.ref_tau > 0",
                            nearest_name(str(loss.reference), list(config.frozen)))  # fmt: skip
    if isinstance(loss, ImportanceLoss) and loss.low >= loss.high:
        yield ConfigProblem("loss.low", loss.low, f"less than loss.high = {loss.high}")


def _teachers(config: RunConfig) -> Iterator[ConfigProblem]:
    """Algorithms whose teacher is missing, or that compare log-probabilities of different distributions."""
    for key, algorithm, sampling in _credited(config):
        teacher = getattr(algorithm, "teacher", None)
        if teacher is not None and teacher not in config.frozen:
            yield ConfigProblem(f"{key}.teacher", teacher, "the name of a model under `frozen`",
                                nearest_name(teacher, list(config.frozen)))  # fmt: skip
        scored = isinstance(algorithm, OPSD) or _scorer(config, algorithm)
        if scored and reshapes(sampling):
            yield ConfigProblem(f"{key}.name", algorithm.name, "temperature and top_p of 1 in the source's sampling, "
                                "no top_k, min_p or penalty, since a reference scores the whole distribution at "
                                "temperature 1")  # fmt: skip
        limit = config.inference.vllm.get("max_model_len")
        if isinstance(algorithm, OPSD) and (limit is None or limit <= config.seq_len):
            yield ConfigProblem("inference.vllm.max_model_len", limit, f"more than seq_len = {config.seq_len}: the "
                                "policy as its own teacher reads a demonstration too")  # fmt: skip


def _credited(config: RunConfig) -> list[tuple[str, AlgorithmConfig, SamplingConfig]]:
    """The algorithm of each training source, with its key."""
    return [(f"env.train.{i}.algorithm" if source.algorithm else "algorithm", source.algorithm or config.algorithm,
             source.sampling) for i, source in enumerate(config.env.train)]  # fmt: skip


def _functions(config: RunConfig) -> Iterator[ConfigProblem]:
    """Functions of the user's whose module cannot be found here."""
    sections: dict[str, Any] = {"loss": config.loss, "algorithm": config.algorithm}
    sections |= {f"env.train.{i}.algorithm": source.algorithm for i, source in enumerate(config.env.train)}
    for key, section in sections.items():
        if isinstance(section, CustomLoss | CustomAlgorithm) and not _is_importable(section.import_path):
            expected = "`module.function` of a module that can be imported from here"
            yield ConfigProblem(f"{key}.import_path", section.import_path, expected)


def _is_importable(function: str) -> bool:
    try:
        return importlib.util.find_spec(function.rpartition(".")[0]) is not None
    except ModuleNotFoundError:  # a parent is missing
        return False


def _sources(config: RunConfig) -> Iterator[ConfigProblem]:
    if not config.env.train and config.mode == "rl":
        yield ConfigProblem("env.train", [], "at least one training source; mode=sample evaluates without any")
    elif not config.env.train and not config.env.eval.sources:
        yield ConfigProblem("env.train", [], "at least one source, or some in env.eval.sources to evaluate alone")
    seen: dict[str, str] = {}
    for key, source in _all_sources(config):
        name = source_name(source)
        if name in ("all", "agg"):
            yield ConfigProblem(f"{key}.name", name, "another name, since this one stands for all sources")
        if name in seen:
            yield ConfigProblem(f"{key}.name", name, f"a name of its own; {seen[name]} has it already")
        seen.setdefault(name, key)
        if source.runtime.name == "subprocess" and source.runtime.image:
            yield ConfigProblem(f"{key}.runtime.image", source.runtime.image,
                                "null, or runtime.name=apptainer: a subprocess has no image")  # fmt: skip
    yield from _shares(config)
    for i, source in enumerate(config.env.train):
        yield from _pools(f"env.train.{i}.order.pools", source)


def _shares(config: RunConfig) -> Iterator[ConfigProblem]:
    shares = [source.ratio_schedule or {0: source.ratio} for source in config.env.train]
    for step in sorted({step for points in shares for step in points}):
        if not any(np.interp(step, sorted(points), [points[s] for s in sorted(points)]) for points in shares):
            yield ConfigProblem("env.train.0.ratio_schedule", config.env.train[0].ratio_schedule,
                                f"a source with a share at step {step}")  # fmt: skip


def _pools(key: str, source: SourceConfig) -> Iterator[ConfigProblem]:
    if not isinstance(source.order, DifficultyPools):
        return
    pools = source.order.pools
    for field in ("name", "threshold"):
        values = [getattr(pool, field) for pool in pools]
        if len(set(values)) < len(values):
            yield ConfigProblem(key, values, f"pools with a {field} each of their own")
    if not any(pool.weight for pool in pools):
        yield ConfigProblem(key, [pool.weight for pool in pools], "a pool with a weight above 0")


def _engines(config: RunConfig) -> Iterator[ConfigProblem]:
    for name in ADDRESS_ARGUMENTS:
        if name in config.inference.vllm:
            yield ConfigProblem(f"inference.vllm.{name}", config.inference.vllm[name],
                                "to be left out: an engine listens where the system has a free port")  # fmt: skip
    for name in PLAN_ARGUMENTS:
        if name in config.inference.vllm:
            yield ConfigProblem(f"inference.vllm.{name}", config.inference.vllm[name],
                                "to be left out: it follows from nodes and GPUs of an engine in the plan")  # fmt: skip
    given, needed = config.inference.gpus_per_replica, engine_gpus(config)
    if given and given < needed:
        yield ConfigProblem("inference.gpus_per_replica", given,
                            f"{needed}, as the parallel sizes of inference.vllm need, or to be left out")  # fmt: skip
    limit = config.inference.vllm.get("max_model_len")
    if isinstance(limit, int) and limit < config.seq_len:
        yield ConfigProblem("inference.vllm.max_model_len", limit,
                            f"at least seq_len = {config.seq_len}, or engines cut rollouts short")  # fmt: skip


def _replay(config: RunConfig) -> Iterator[ConfigProblem]:
    rollouts = config.trainer.replay.rollouts
    last = config.trainer.replay.until or config.max_steps
    if not rollouts or not Path(rollouts).is_dir():
        yield ConfigProblem("trainer.replay.rollouts", rollouts, "the `rollouts` folder of a run")
    elif not Path(rollouts, f"step_{last}.jsonl.zst").is_file():
        yield ConfigProblem("trainer.replay.rollouts", rollouts, f"a folder with the rollouts of step {last}, the last")


def _fp8(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.trainer.fp8_experts and not config.trainer.fp8:
        yield ConfigProblem("trainer.fp8_experts", True, "false, or trainer.fp8=true beside it")
    if not config.trainer.fp8:
        return
    if config.trainer.dtype != "bfloat16":
        yield ConfigProblem("trainer.fp8", True, f"false, or trainer.dtype=bfloat16 in place of {config.trainer.dtype}")
    if config.lora.on:
        yield ConfigProblem("trainer.fp8", True, "false with adapters, whose base is not trained")


def _ep_dispatch(config: RunConfig) -> Iterator[ConfigProblem]:
    key, parallel = "trainer.parallel.ep_dispatch", config.trainer.parallel
    if parallel.ep_dispatch != "deepep":
        return
    if config.trainer.dtype != "bfloat16":
        yield ConfigProblem(key, "deepep", f"all_to_all, or trainer.dtype=bfloat16 in place of {config.trainer.dtype}")
    if parallel.ep == 1:
        yield ConfigProblem(key, "deepep", "all_to_all, as trainer.parallel.ep=1 divides no experts, or a larger ep")


def _profile(config: RunConfig) -> Iterator[ConfigProblem]:
    profile, ranks = config.trainer.profile, trainer_ranks(config)
    if not profile.steps:
        return
    if "trainer" not in components_of(config):
        yield ConfigProblem("trainer.profile.steps", profile.steps, f"0, since mode={config.mode} has no trainer")
        return
    if profile.start > config.max_steps:
        yield ConfigProblem("trainer.profile.start", profile.start, f"at most max_steps = {config.max_steps}")
    if profile.ranks is not None and not all(rank < ranks for rank in profile.ranks):
        yield ConfigProblem("trainer.profile.ranks", profile.ranks, f"null for all, or some of 0 to {ranks - 1}")


def _bench(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.trainer.bench.warmup >= config.max_steps:
        yield ConfigProblem("trainer.bench.warmup", config.trainer.bench.warmup,
                            f"less than max_steps = {config.max_steps}, which counts warm-up steps too")  # fmt: skip
    yield from _rows(config)


def _bench_inference(config: RunConfig) -> Iterator[ConfigProblem]:
    bench = config.inference.bench
    if bench.prompt_tokens + bench.reply_tokens > config.seq_len:
        room = config.seq_len - bench.reply_tokens
        expected = f"at most {room}, so that prompt and reply together fit into seq_len"
        yield ConfigProblem("inference.bench.prompt_tokens", bench.prompt_tokens, expected)
    if bench.shared_tokens > bench.prompt_tokens:
        yield ConfigProblem("inference.bench.shared_tokens", bench.shared_tokens,
                            f"at most inference.bench.prompt_tokens = {bench.prompt_tokens}")  # fmt: skip


def source_name(source: TaskSource) -> str:
    """The name of a source in metrics and process names."""
    return source.name or source.id.rpartition(".")[2]


def source_algorithm(config: RunConfig, source: str) -> AlgorithmConfig:
    """Credit assignment of a training source: its own, or the run's."""
    own = (s.algorithm for s in config.env.train if source_name(s) == source)
    return next(own, None) or config.algorithm


def group_size(config: RunConfig, source: str) -> int:
    """Rollouts of a group of a training source: its own number, or the run's."""
    own = (own_group_size(config, s) for s in config.env.train if source_name(s) == source)
    return next(own, config.orchestrator.group_size)


def own_group_size(config: RunConfig, source: SourceConfig) -> int:
    """The same of a source itself."""
    return source.group_size or config.orchestrator.group_size


def largest_group(config: RunConfig) -> int:
    """Rollouts of a group of the training source that has the most."""
    return max((own_group_size(config, s) for s in config.env.train), default=config.orchestrator.group_size)


def sampled_by(config: RunConfig, source: str) -> str | None:
    """The frozen model that samples a training source in the policy's place, if one does."""
    algorithm = source_algorithm(config, source)
    return algorithm.teacher if isinstance(algorithm, Distillation) else None


def scored_by(config: RunConfig, source: str) -> str | None:
    """The frozen model that scores the samples of a training source, if one does."""
    return _scorer(config, source_algorithm(config, source))


def _scorer(config: RunConfig, algorithm: AlgorithmConfig) -> str | None:
    if isinstance(algorithm, OPD):
        return algorithm.teacher
    if isinstance(config.loss, PolicyGradient) and config.loss.ref_tau and algorithm.component == "rl":
        return config.loss.reference
    return None


def source_adapter(config: RunConfig, source: TaskSource) -> str:
    """The adapter that a source samples from; empty where the engines know one policy only."""
    return (source.adapter or config.lora.adapters[0]) if config.lora.served else ""


def _all_sources(config: RunConfig) -> list[tuple[str, TaskSource]]:
    train: list[tuple[str, TaskSource]] = [(f"env.train.{i}", s) for i, s in enumerate(config.env.train)]
    return train + [(f"env.eval.sources.{i}", s) for i, s in enumerate(config.env.eval.sources)]
