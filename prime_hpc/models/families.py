"""The model families with an implementation of our own, by `model_type`. Importing this module needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prime_hpc.config.json_files import hf_config_of
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sizes import components_of
from prime_hpc.errors import ConfigProblem
from prime_hpc.models import traits
from prime_hpc.models.spec import WINDOWS, HFConfig

if TYPE_CHECKING:
    from prime_hpc.models.family import Family

MODULES = {
    "afmoe": "prime_hpc.models.afmoe",
    "gemma3_text": "prime_hpc.models.gemma3",
    "deepseek_v3": "prime_hpc.models.deepseek_v3",
    "glm4_moe": "prime_hpc.models.glm4_moe",
    "glm_moe_dsa": "prime_hpc.models.glm_moe_dsa",
    "llama": "prime_hpc.models.llama",
    "minimax_m2": "prime_hpc.models.minimax_m2",
    "ministral": "prime_hpc.models.mistral",
    "mistral": "prime_hpc.models.mistral",
    "qwen2": "prime_hpc.models.qwen2",
    "qwen3": "prime_hpc.models.qwen3",
    "qwen3_5_moe_text": "prime_hpc.models.qwen3_5_moe",
    "qwen3_5_text": "prime_hpc.models.qwen3_5",
    "qwen3_moe": "prime_hpc.models.qwen3_moe",
}
SEEING = ("qwen3_vl",)
"""Image-text models, all of transformers."""
IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Where a model's image processor is described; the second describes others beside it."""
EXPERT_KEYS = {"num_experts", "n_routed_experts", "num_local_experts"}
"""Any of these in a configuration makes it a mixture of experts."""
GELU = "gelu_pytorch_tanh"
UNKNOWN = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Keys of configurations that ask for what no family of ours has."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def load_family(model_type: str) -> Family:
    """The family of a `model_type` in `MODULES`."""
    return importlib.import_module(MODULES[model_type]).FAMILY


def find_obstacle(hf_config: HFConfig) -> str | None:
    """Why a model cannot run on an implementation of our own, or None if it can."""
    model_type = hf_config.get("model_type")
    if model_type in traits.TOWERED:
        return f"{model_type} has a vision tower ({traits.TAKEN_OUT})"
    if model_type not in MODULES:
        return f"{model_type} is not among {', '.join(MODULES)}"
    if model_type not in WINDOWS and _slides(hf_config):
        return "it has sliding-window attention"
    activation, expected = _activation(hf_config)
    if activation != expected:
        return f"its activation is {activation}, not {expected}"
    unknown = next((rope_type for rope_type in _rope_types(hf_config) if rope_type not in ROPE_TYPES), None)
    if unknown:
        return f"its rotary embedding is {unknown}, not one of {', '.join(ROPE_TYPES)}"
    special = next((key for key in UNKNOWN if hf_config.get(key)), None)
    if special:
        return f"it has {special}"
    if hf_config.get("quantization_config"):
        return "its weights are quantised"
    return None


def _activation(hf_config: HFConfig) -> tuple[str, str]:
    """That of a model, and the one that its family has here."""
    if hf_config["model_type"] == "gemma3_text":
        return hf_config.get("hidden_activation") or GELU, GELU
    return hf_config.get("hidden_act", "silu"), "silu"


def _rope_types(hf_config: HFConfig) -> list[str]:
    """That of all layers, or of each kind."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
    return [str(kind.get("rope_type", kind.get("type", "default"))) for kind in kinds]


def _slides(hf_config: HFConfig) -> bool:
    return bool(hf_config.get("use_sliding_window")) or "sliding_attention" in (hf_config.get("layer_types") or ())


def choose_implementation(config: RunConfig, hf_config: HFConfig) -> str:
    """`native` or `hf` for `model.impl`; `auto` takes native wherever it can run."""
    if config.model.impl != "auto":
        return config.model.impl
    return "hf" if config.trainer.attn == "eager" or find_obstacle(hf_config) else "native"


def _native_only(config: RunConfig, hf_config: HFConfig, why: str) -> list[ConfigProblem]:
    problems = []
    if config.trainer.router_replay:
        expected = f"false, since only native models can replay, and {why}"
        problems.append(ConfigProblem("trainer.router_replay", True, expected))
    if config.trainer.linear_attn != "auto":
        expected = f"auto, since only native models choose these kernels, and {why}"
        problems.append(ConfigProblem("trainer.linear_attn", config.trainer.linear_attn, expected))
    if config.lora.on and "experts" in config.lora.targets and EXPERT_KEYS & hf_config.keys():
        expected = f"targets without experts, whose adapters need a native model, and {why}"
        problems.append(ConfigProblem("lora.targets", config.lora.targets, expected))
    return problems


def runs_eager(config: RunConfig, hf_config: HFConfig) -> bool:
    """Whether a model of transformers runs its eager attention."""
    wanted = config.trainer.attn
    return wanted == "eager" or (wanted == "auto" and traits.needs_eager(hf_config) is not None)


def runs_one_by_one(config: RunConfig, hf_config: HFConfig) -> bool:
    """Whether the trainer runs the documents of a row one by one, as in transformers they would see one another."""
    return choose_implementation(config, hf_config) == "hf" and traits.runs_one_by_one(hf_config)


def no_context_parallelism(cp: int) -> ConfigProblem:
    expected = "1, as layers of this model hand something from token to token, which ranks do not"
    return ConfigProblem("trainer.parallel.cp", cp, expected)


def no_tenants(adapters: Iterable[str]) -> ConfigProblem:
    expected = "one adapter, as documents of this model run one by one"
    return ConfigProblem("lora.adapters", sorted(adapters), expected)


def _of_transformers(config: RunConfig, hf_config: HFConfig) -> list[ConfigProblem]:
    """What a model of transformers cannot be trained with."""
    kind, problems, trainer = hf_config.get("model_type"), [], config.trainer
    if kind in traits.TOWERED:
        expected = f"a text model, since {kind} has a vision tower: {traits.TAKEN_OUT}"
        problems.append(ConfigProblem("model.path", config.model.path, expected))
    elif "vision_config" in hf_config and kind not in SEEING:
        expected = f"a text model or one of type {', '.join(SEEING)}, as no other that sees is trained, such as {kind}"
        problems.append(ConfigProblem("model.path", config.model.path, expected))
    elif kind in traits.ELSEWHERE:
        expected = f"a decoder whose blocks are `model.layers` in transformers, which those of {kind} are not"
        problems.append(ConfigProblem("model.path", config.model.path, expected))
    if runs_one_by_one(config, hf_config) and len(config.lora.adapters) > 1:
        problems.append(no_tenants(config.lora.adapters))
    if hf_config.get("quantization_config"):
        expected = "weights in bfloat16 or float32, as quantised ones are not trained: dequantise them first"
        problems.append(ConfigProblem("model.path", config.model.path, expected))
    why = traits.needs_eager(hf_config)
    if why and trainer.attn not in ("auto", "eager"):
        problems.append(ConfigProblem("trainer.attn", trainer.attn, f"auto or eager, since {why}"))
    return problems


def _seeing(config: RunConfig) -> list[ConfigProblem]:
    """What a model that sees cannot do."""
    model, vllm, problems = config.model, config.inference.vllm, []
    if vllm.get("language_model_only") or dict(vllm.get("limit_mm_per_prompt") or {}).get("image") == 0:
        key = "language_model_only" if vllm.get("language_model_only") else "limit_mm_per_prompt"
        expected = "to be left out, as engines take what the policy takes: images, and weights of the vision tower"
        problems.append(ConfigProblem(f"inference.vllm.{key}", vllm[key], expected))
    if model.path and not any((Path(model.path) / name).exists() for name in IMAGE_PROCESSORS):
        expected = f"a directory with the model's image processor ({IMAGE_PROCESSORS[0]})"
        problems.append(ConfigProblem("model.path", model.path, expected))
    if config.lora.on:
        problems.append(ConfigProblem("lora.rank", config.lora.rank, "0, as a model that sees takes no adapters"))
    if not model.freeze_vision and config.update.kv == "keep":
        expected = ("recompute or drain, as model.freeze_vision is false: engines would go on with what an older tower "
                    "made of an image")  # fmt: skip
        problems.append(ConfigProblem("update.kv", "keep", expected))
    return problems


def find_model_problems(config: RunConfig) -> list[ConfigProblem]:
    """Why `model.impl=native` cannot run, what it alone can do that is asked of another, or what a model that sees or
    one of transformers cannot do. A directory without a model is another check's problem."""
    hf_config = hf_config_of(config.model)
    obstacle = find_obstacle(hf_config) if hf_config else None
    problems = []
    if hf_config and choose_implementation(config, hf_config) == "hf":
        problems += _native_only(config, hf_config, obstacle or "model.impl or trainer.attn ask for transformers")
        problems += _of_transformers(config, hf_config) if "trainer" in components_of(config) else []
    if hf_config and hf_config.get("model_type") in SEEING:
        problems += _seeing(config)
    if config.model.impl != "native":
        return problems
    if obstacle:
        problems.append(ConfigProblem("model.impl", "native", f"auto or hf for this model, since {obstacle}"))
    if config.trainer.attn == "eager":
        problems.append(ConfigProblem("trainer.attn", "eager", "auto, or another that packs documents"))
    return problems
