"""Arguments of vLLM, under `inference.vllm`, that an engine of a run does not survive, or only with wrong results."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.json_files import read_json
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem

REQUANTISING = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "int8_per_channel_weight_only",
                "online")  # fmt: skip
"""Values of vLLM's `quantization` that quantise what is loaded, and so every update again."""
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that guess from tokens alone."""


@dataclass(frozen=True)
class Refused:
    """An argument that is refused where `bad` holds of its value and the run; `expected` says what to do, and why."""

    name: str
    bad: Callable[[Any, RunConfig], bool]
    expected: str


def find_argument_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Every refused argument that `inference.vllm` gives a value, and a quantised model that is to be trained."""
    given = config.inference.vllm
    for refused in REFUSED:
        value = given.get(refused.name)
        if value is not None and refused.bad(value, config):
            shown = "***" if refused.name == "api_key" else value
            yield ConfigProblem(f"inference.vllm.{refused.name}", shown, refused.expected)
    model = read_json(Path(config.model.path) / "config.json") or {}
    if _updated(None, config) and "quantization_config" in model:
        method = model["quantization_config"].get("quant_method")
        yield ConfigProblem("model.path", config.model.path,
                            f"weights that are not quantised ({method}): the trainer sends them as they are; "
                            "inference.vllm.quantization=fp8 quantises in the engine")  # fmt: skip


def _always(value: Any, config: RunConfig) -> bool:
    return True


def _on(value: Any, config: RunConfig) -> bool:
    return bool(value)


def _updated(value: Any, config: RunConfig) -> bool:
    """The engines get new weights while they serve."""
    return config.mode == "rl"


def _offloads(config: RunConfig) -> bool:
    """KV blocks leave the GPU's memory."""
    transfer = config.inference.vllm.get("kv_transfer_config") or {}
    connector = transfer.get("kv_connector", "") if isinstance(transfer, dict) else str(transfer)
    return config.inference.vllm.get("kv_offloading_size") is not None or "Offloading" in connector


def _outlives_weights(value: Any, config: RunConfig) -> bool:
    """A tier behind the host's memory, which vLLM does not clear with its caches, under requests that begin anew."""
    extra = value.get("kv_connector_extra_config", {}) if isinstance(value, dict) else {}
    return _updated(value, config) and config.update.kv != "keep" and bool(extra.get("secondary_tiers"))


def _has_weights(value: Any, config: RunConfig) -> bool:
    method = value.get("method") if isinstance(value, dict) else value
    return _updated(value, config) and method not in WITHOUT_WEIGHTS


def _replays_what_is_offloaded(value: Any, config: RunConfig) -> bool:
    return config.trainer.router_replay and _offloads(config)


def _divides_replay(value: Any, config: RunConfig) -> bool:
    return config.trainer.router_replay and isinstance(value, int) and value > 1


REFUSED = (
    Refused("model", _always, "to be left out: model.path names the model"),
    Refused("tokenizer", _always, "to be left out: model.tokenizer names the tokenizer"),
    Refused("served_model_name", _always, "to be left out: model.served_name is the name in requests"),
    Refused("api_key", _always, "to be left out: the run's own token guards every route"),
    Refused("worker_extension_cls", _always, "to be left out: it is how weights reach the workers"),
    Refused("logprobs_mode", lambda value, _: value != "processed_logprobs",
            "processed_logprobs: those of the distribution that is sampled, which importance ratios need"),
    Refused("stream_interval", lambda value, _: value != 1,
            "1: tokens that are held back would get the version of a later moment"),
    Refused("enable_lora", _on, "to be left out: lora.rank turns adapters on"),
    Refused("enable_eplb", lambda value, config: bool(value) and _updated(value, config),
            "false while weights are updated: vLLM loads experts to where they lay before they were balanced"),
    Refused("speculative_config", _has_weights,
            f"a method without weights ({', '.join(WITHOUT_WEIGHTS)}): updates do not reach a draft model"),
    Refused("quantization", lambda value, config: _updated(value, config) and value not in REQUANTISING,
            f"one that quantises every update anew ({', '.join(REQUANTISING)})"),
    Refused("enable_prefix_caching", lambda value, config: not value and _offloads(config),
            "true: offloaded KV blocks are found as cached prefixes"),
    Refused("enable_prefix_caching", lambda value, config: not value and config.trainer.router_replay,
            "true: vLLM records experts together with cached prefixes, and trainer.router_replay needs them"),
    Refused("kv_transfer_config", _outlives_weights,
            "no secondary_tiers, or update.kv=keep: tiers behind the host's memory keep the KV of old weights, and "
            "requests that begin anew after an update would read it"),
    Refused("kv_transfer_config", _replays_what_is_offloaded,
            "no offloading with trainer.router_replay: KV blocks come back without their tokens' experts"),
    Refused("kv_offloading_size", _replays_what_is_offloaded,
            "to be left out with trainer.router_replay: KV blocks come back without their tokens' experts"),
    Refused("pipeline_parallel_size", _divides_replay, "1 with trainer.router_replay: vLLM records no experts there"),
    Refused("decode_context_parallel_size", _divides_replay,
            "1 with trainer.router_replay: vLLM records no experts there"),
    Refused("disable_log_stats", lambda value, config: bool(value) and config.orchestrator.max_inflight == "auto",
            "false: orchestrator.max_inflight=auto follows the engines' metrics"),
)  # fmt: skip
"""Sources: vLLM pull requests 55228 (EPLB) and 46725 (draft models); vLLM 0.32's `TieringOffloadingManager.reset_cache`
(tiers), `VllmConfig._verify_aux_output_compatibility` (recorded experts), `OutputProcessor` (stream_interval)."""
