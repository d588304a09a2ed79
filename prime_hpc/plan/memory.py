"""How much memory each kind of process needs at its peak: pure functions of the configuration and of config.json.

How far these are from what was measured is in docs/foresight.md.
"""

from dataclasses import dataclass, field

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import trainer_ranks
from prime_hpc.models import spec
from prime_hpc.models.degrees import DEEPEP_NODE, choose_degrees
from prime_hpc.models.spec import HFConfig
from prime_hpc.plan.devices import GIB, Device
from prime_hpc.plan.peak import (
    BYTES,
    MASTER,
    MOMENTS,
    Parts,
    kept_activations,
    sharing_ranks,
    trained_params,
    training_peak,
)
from prime_hpc.plan.workload import longest_row

DEEPEP_TOKENS, DEEPEP_TOKEN_BYTES = 10 * 256, 128 * 16
"""Room of DeepEP's buffer for tokens of each rank of a node: so many, in ten channels, with so many bytes beside the
states. By its settings for up to 8 ranks; with more there is more, and room for RDMA too."""
ENGINE_RESERVE = 1.2 * GIB
"""What vLLM keeps beside weights and KV cache for its largest forward and CUDA graphs; measured at 0.6B."""
ENGINE_SHARE = 0.9
ENGINE_SHARE_BESIDE_TRAINER = 0.4
CPU_CACHE_BYTES = 128 * 2**20
FILES_BYTES = 3 * 1000 * 2**20
"""Files of weights that a rank holds at most: one that is being gathered, two that are being written."""
CONTEXT = 0.8 * GIB
"""Of a trainer's GPU that is not torch's to allocate: CUDA context, kernels, workspaces of libraries. On an H200 that
ran full, 139.7 GiB were in use and 138.8 of them allocated or kept by torch."""
IDLE = {"trainer": 0.4 * GIB, "trainer on a GPU": 3.0 * GIB, "engine": 5.0 * GIB, "engine on a CPU": 1.5 * GIB,
        "environment": 0.3 * GIB, "orchestrator": 0.3 * GIB}  # fmt: skip
"""Resident bytes of a process whose model is tiny: interpreter, libraries, CUDA context. That of a trainer on a CPU was
measured, the others are assumed."""


@dataclass(frozen=True)
class RoleMemory:
    """Bytes by what they are for, of one process: on its GPU (empty without one) and on its host.

    `limit` is what the GPU gives it, None where there is none or it is not known; `note` says what else follows.
    """

    role: str
    processes: int
    gpu: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    limit: float | None = None
    note: str = ""

    @property
    def gpu_bytes(self) -> float:
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


def trainer_memory(config: RunConfig, hf_config: HFConfig, *, on_gpu: bool, device: Device | None = None,
                   row_tokens: int | None = None, rows: int = 2) -> RoleMemory:  # fmt: skip
    """Peak of a trainer rank.

    Args:
        row_tokens: tokens of the longest row; as many as a row may have when left out.
        rows: micro-batches of a step.
    """
    ranks = trainer_ranks(config)
    parts = training_peak(config, hf_config, on_gpu=on_gpu, row_tokens=row_tokens, rows=rows)
    if not on_gpu:
        host = {"process": IDLE["trainer"], **parts, **_being_written(config, hf_config)}
        return RoleMemory("trainer rank", ranks, host=host)
    parts |= _dispatch_buffer(config, hf_config)
    away = _offloaded(config, hf_config, row_tokens or longest_row(config))
    host = {"process": IDLE["trainer on a GPU"], **away, **_being_written(config, hf_config)}
    return RoleMemory("trainer rank", ranks, parts, host, device.memory - CONTEXT if device else None)


def _dispatch_buffer(config: RunConfig, hf_config: HFConfig) -> Parts:
    ep = choose_degrees(config, trainer_ranks(config)).ep
    if ep == 1 or config.trainer.parallel.ep_dispatch != "deepep":
        return {}
    width = BYTES["bfloat16"] * spec.layer_widths(hf_config)[0].hidden + DEEPEP_TOKEN_BYTES
    return {"DeepEP": DEEPEP_TOKENS * min(ep, DEEPEP_NODE) * width}


def _being_written(config: RunConfig, hf_config: HFConfig) -> Parts:
    """A rank's shards of a checkpoint, copied before they are written while training goes on, and a file of weights."""
    if config.mode == "bench":
        return {}
    trained = MASTER * trained_params(config, hf_config) * (1 + MOMENTS[config.optimizer.name])
    return {
        "checkpoint being written": trained / sharing_ranks(config),
        "weights being written": _written(config, hf_config),
    }


def _offloaded(config: RunConfig, hf_config: HFConfig, row_tokens: int) -> Parts:
    """What of a rank's GPU lies on the host for a while, by the trainer's keys."""
    trainer, parts = config.trainer, {}
    if trainer.optimizer_offload:
        moments = MASTER * MOMENTS[config.optimizer.name] * trained_params(config, hf_config)
        parts["optimiser"] = moments / sharing_ranks(config)
    if trainer.activation_offload:
        _, kept = kept_activations(config, hf_config, row_tokens, on_gpu=True)
        parts["activations"] = row_tokens / trainer.parallel.cp * sum(kept)
    return parts


def engine_memory(config: RunConfig, hf_config: HFConfig, *, gpus: int, device: Device | None = None,
                  beside_trainer: bool = False) -> RoleMemory:  # fmt: skip
    """Of one GPU of an engine, or of an engine on a CPU; the KV cache takes what the others leave of its share."""
    replicas, vllm = config.inference.replicas, config.inference.vllm
    weights = engine_weights(config, hf_config, gpus)
    if not gpus:
        cache = vllm.get("kv_cache_memory_bytes", CPU_CACHE_BYTES)
        host = {"process": IDLE["engine on a CPU"], "weights": weights, "KV cache": cache}
        return RoleMemory("engine", replicas, host=host, note=_sequences(config, hf_config, cache, 1))
    host = {"process": IDLE["engine"], "weights being loaded": _written(config, hf_config)}
    if offloaded := vllm.get("kv_offloading_size"):  # of all ranks of the engine together
        host["KV cache"] = float(offloaded) * GIB / gpus
    parts = {"weights": weights, "forward": ENGINE_RESERVE}
    if device is None:
        return RoleMemory("engine GPU", replicas * gpus, parts, host)
    share = vllm.get("gpu_memory_utilization", ENGINE_SHARE_BESIDE_TRAINER if beside_trainer else ENGINE_SHARE)
    parts["KV cache"] = max(0.0, share * device.memory - weights - ENGINE_RESERVE)
    note = _sequences(config, hf_config, parts["KV cache"], gpus)
    return RoleMemory("engine GPU", replicas * gpus, parts, host, share * device.memory, note)


def engine_weights(config: RunConfig, hf_config: HFConfig, gpus: int) -> float:
    """Bytes of weights on one GPU of an engine: tensor and pipeline parallel ranks share them, data-parallel ones only
    the experts, and those only with expert parallelism."""
    vllm = config.inference.vllm
    width = 1 if vllm.get("quantization") == "fp8" else (BYTES["bfloat16"] if gpus else BYTES["float32"])
    split = int(vllm.get("tensor_parallel_size", 1)) * int(vllm.get("pipeline_parallel_size", 1))
    spread = split * int(vllm.get("data_parallel_size", 1)) if vllm.get("enable_expert_parallel") else split
    experts = spec.expert_params(hf_config)
    return width * ((spec.param_count(hf_config) - experts) / split + experts / spread)


def cached_tokens(config: RunConfig, hf_config: HFConfig, cache_bytes: float, gpus: int) -> int:
    """Tokens whose keys and values fit into the caches of all GPUs of an engine, of `cache_bytes` each.

    Heads are shared out over tensor parallel ranks, layers over pipeline stages, sequences over data-parallel ranks; a
    latent cache is the same on every tensor parallel rank.
    """
    copies = int(config.inference.vllm.get("tensor_parallel_size", 1)) if _latent(hf_config) else 1
    return int(cache_bytes * max(gpus, 1) / copies / _token_bytes(config, hf_config, gpus))


def cached_sequences(config: RunConfig, hf_config: HFConfig, cache_bytes: float, gpus: int, length: float) -> int:
    """Sequences of `length` tokens that fit there, with the states that they have however long they are."""
    token = _token_bytes(config, hf_config, gpus)
    states = spec.state_bytes(hf_config, BYTES["bfloat16" if gpus else "float32"])
    return int(cached_tokens(config, hf_config, cache_bytes, gpus) / (length + states / token))


def _token_bytes(config: RunConfig, hf_config: HFConfig, gpus: int) -> int:
    fp8 = str(config.inference.vllm.get("kv_cache_dtype", "auto")).startswith("fp8")
    return spec.kv_bytes_per_token(hf_config, 1 if fp8 else BYTES["bfloat16" if gpus else "float32"])


def _latent(hf_config: HFConfig) -> bool:
    return bool(spec.layer_widths(hf_config)[0].latent)


def other_memory(config: RunConfig) -> list[RoleMemory]:
    """Of the processes that hold no model."""
    workers = len(config.env.train) * config.env.workers + len(config.env.eval.sources)
    batches = {"rollouts": 16.0 * config.orchestrator.batch_size * config.seq_len * (1 + config.orchestrator.max_lead)}
    return [RoleMemory("orchestrator", 1, host={"process": IDLE["orchestrator"], **batches}),
            RoleMemory("environment", workers, host={"process": IDLE["environment"]})]  # fmt: skip


def _written(config: RunConfig, hf_config: HFConfig) -> float:
    published = config.trainer.dtype if config.trainer.publish_dtype == "auto" else config.trainer.publish_dtype
    return min(FILES_BYTES, BYTES[published] * spec.param_count(hf_config))


def _sequences(config: RunConfig, hf_config: HFConfig, cache_bytes: float, gpus: int) -> str:
    tokens = cached_tokens(config, hf_config, cache_bytes, gpus)
    length = int(config.inference.vllm.get("max_model_len", config.seq_len))
    sequences = cached_sequences(config, hf_config, cache_bytes, gpus, length)
    return f"{tokens:,} tokens of KV cache an engine: {sequences:,} sequences of {length:,}"
