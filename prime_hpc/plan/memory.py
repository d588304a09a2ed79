"""How much memory each kind of process needs at its peak: pure functions of the configuration and of config.json.

How far GPU peaks were from the few that were measured is in docs/foresight.md; sizes of idle processes are assumed.
"""

from dataclasses import dataclass, field
from math import ceil

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import trainer_ranks
from prime_hpc.models import activations, spec
from prime_hpc.models.activations import NormKernel
from prime_hpc.models.families import choose_implementation
from prime_hpc.models.spec import HFConfig
from prime_hpc.plan.devices import GIB, Device

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
"""Bytes of a parameter, a gradient or a moment of AdamW: all in float32."""
MOMENTS = {"adamw": 2, "muon": 1, "signsgd": 0}
"""Tensors of a parameter's size that an optimiser keeps; muon has two for what is no matrix."""
ENGINE_RESERVE = 1.2 * GIB
"""What vLLM keeps beside weights and KV cache for its largest forward and CUDA graphs; measured at 0.6B."""
ENGINE_SHARE = 0.9
ENGINE_SHARE_BESIDE_TRAINER = 0.4
CPU_CACHE_BYTES = 128 * 2**20
FILE_BYTES = 2 * GIB
"""A file of weights that a rank holds while it writes."""
IDLE = {"trainer": 0.5 * GIB, "trainer on a GPU": 3.0 * GIB, "engine": 5.0 * GIB, "engine on a CPU": 1.5 * GIB,
        "environment": 0.3 * GIB, "orchestrator": 0.3 * GIB}  # fmt: skip
"""Resident bytes of a process before it has done anything: interpreter, libraries, CUDA context."""


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
                   row_tokens: int | None = None) -> RoleMemory:  # fmt: skip
    """Peak of a trainer rank: the begin of the backward pass of the second micro-batch, when gradients exist already.

    Args:
        row_tokens: tokens of the longest row; as many as a row may have when left out.
    """
    ranks = trainer_ranks(config)
    parts = trainer_state(config, hf_config) | trainer_work(config, hf_config, row_tokens, on_gpu=on_gpu)
    saving = {
        "checkpoint being written": parts["weights"] + parts["optimiser"],
        "weights being written": _written(config, hf_config),
    }
    if not on_gpu:
        return RoleMemory("trainer rank", ranks, host={"process": IDLE["trainer"], **parts, **saving})
    host = {"process": IDLE["trainer on a GPU"], **saving}
    return RoleMemory("trainer rank", ranks, parts, host, device.memory if device else None)


def trainer_state(config: RunConfig, hf_config: HFConfig) -> dict[str, float]:
    """Bytes of a rank that stay from step to step, or for as long as a step lasts.

    Expert parallelism gathers less than is counted here: experts are taken to be whole on each rank.
    """
    shards = trainer_ranks(config) / config.trainer.parallel.dp_replicate
    weights = MASTER * spec.param_count(hf_config) / shards
    trained = MASTER * trained_params(config, hf_config) / shards
    split = config.trainer.parallel.tp
    whole = BYTES[config.trainer.dtype] * (spec.root_params(hf_config) + 2 * spec.largest_layer(hf_config) / split)
    return {"weights": weights, "gradients": trained, "optimiser": MOMENTS[config.optimizer.name] * trained,
            "gathered weights": whole}  # fmt: skip


def trained_params(config: RunConfig, hf_config: HFConfig) -> float:
    """Parameters with a gradient: all; with adapters r(a + b) for each a x b matrix, every side taken to be as long as
    the hidden size, since few are shorter."""
    parameters, hidden = spec.param_count(hf_config), spec.layer_widths(hf_config)[0].hidden
    if not config.lora.on:
        return parameters
    return min(1.0, 2 * config.lora.rank / hidden * len(config.lora.adapters)) * parameters


def trainer_work(config: RunConfig, hf_config: HFConfig, row_tokens: int | None, *, on_gpu: bool) -> dict[str, float]:
    """Bytes of the forward and backward pass of one row: what layers keep, and the logits of a chunk.

    The LM head holds three float32 copies of a chunk's logits in the forward; in the backward two of them beside the
    gradient of its weight.
    """
    trainer = config.trainer
    tokens = ceil((row_tokens or longest_row(config)) / trainer.parallel.cp)
    width, vocabulary = BYTES[trainer.dtype], spec.vocabulary(hf_config)
    norm, hidden = _norm(config, hf_config, on_gpu=on_gpu), spec.layer_widths(hf_config)[0].hidden
    joined = trainer.attn in ("auto", "sdpa") and not trainer.compile
    kept = activations.kept_bytes(hf_config, width, norm, joined=joined, split=trainer.parallel.tp)
    last = tokens * hidden * (activations.norm_bytes(norm, width) + 2 * width)
    logits = MASTER * min(tokens, trainer.head_chunk_tokens) * vocabulary
    head = max(3 * logits, 2 * logits + (MASTER + width) * vocabulary * hidden)
    if trainer.activation_checkpointing == "none":
        return {"activations": tokens * sum(kept) + last, "logits": head}
    if trainer.activation_checkpointing == "selective":
        left = activations.product_bytes(hf_config, width, split=trainer.parallel.tp)
    else:
        left = activations.input_bytes(hf_config, width)
    one_anew = tokens * max(all_of_it - part for all_of_it, part in zip(kept, left, strict=True))
    return {"activations": tokens * sum(left) + last + max(0, one_anew - head), "logits": head}


def longest_row(config: RunConfig) -> int:
    """Tokens of a packed row at most."""
    return config.trainer.micro_batch_tokens or config.seq_len


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
    vllm = config.inference.vllm
    width = 1 if str(vllm.get("kv_cache_dtype", "auto")).startswith("fp8") else BYTES["bfloat16" if gpus else "float32"]
    copies = int(vllm.get("tensor_parallel_size", 1)) if spec.layer_widths(hf_config)[0].latent else 1
    return int(cache_bytes * max(gpus, 1) / copies / spec.kv_bytes_per_token(hf_config, width))


def other_memory(config: RunConfig) -> list[RoleMemory]:
    """Of the processes that hold no model."""
    workers = len(config.env.train) * config.env.workers + len(config.env.eval.sources)
    batches = {"rollouts": 16.0 * config.orchestrator.batch_size * config.seq_len * (1 + config.orchestrator.max_lead)}
    return [RoleMemory("orchestrator", 1, host={"process": IDLE["orchestrator"], **batches}),
            RoleMemory("environment", workers, host={"process": IDLE["environment"]})]  # fmt: skip


def _norm(config: RunConfig, hf_config: HFConfig, *, on_gpu: bool) -> NormKernel:
    if config.trainer.compile:
        return "fused"
    if choose_implementation(config, hf_config) == "hf":
        return "hf"
    return "fused" if on_gpu else "composite"


def _written(config: RunConfig, hf_config: HFConfig) -> float:
    published = config.trainer.dtype if config.trainer.publish_dtype == "auto" else config.trainer.publish_dtype
    return min(FILE_BYTES, BYTES[published] * spec.param_count(hf_config))


def _sequences(config: RunConfig, hf_config: HFConfig, cache_bytes: float, gpus: int) -> str:
    tokens = cached_tokens(config, hf_config, cache_bytes, gpus)
    length = int(config.inference.vllm.get("max_model_len", config.seq_len))
    return f"{tokens:,} tokens of KV cache an engine: {tokens // length:,} sequences of {length:,}"
