"""Which implementation a model gets, and why."""

import json
from pathlib import Path

import pytest

from prime_hpc.config.run import RunConfig
from prime_hpc.models.families import MODULES, choose_implementation, find_model_problems, find_obstacle, load_family

OBSTACLES = {
    f"gpt2 is not among {', '.join(MODULES)}": {"model_type": "gpt2"},
    "it has sliding-window attention": {"model_type": "llama", "layer_types": ["sliding_attention"]},
    "its activation is gelu, not silu": {"model_type": "llama", "hidden_act": "gelu"},
    "its rotary embedding is longrope, not one of default, linear, llama3, yarn": {
        "model_type": "llama",
        "rope_scaling": {"type": "longrope"},
    },
    "its activation is gelu, not gelu_pytorch_tanh": {"model_type": "gemma3_text", "hidden_activation": "gelu"},
    "it has final_logit_softcapping": {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
    "its rotary embedding is dynamic, not one of default, linear, llama3, yarn": {
        "model_type": "gemma3_text",
        "rope_parameters": {"sliding_attention": {}, "full_attention": {"rope_type": "dynamic"}},
    },
    "its weights are quantised": {"model_type": "qwen3_moe", "quantization_config": {"quant_method": "fp8"}},
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_obstacles_are_named(obstacle):
    assert find_obstacle(OBSTACLES[obstacle]) == obstacle


@pytest.mark.parametrize("model_type", MODULES)
def test_every_family_can_be_loaded(model_type):
    assert find_obstacle({"model_type": model_type, "hidden_act": "silu"}) is None
    experts = list(load_family(model_type).conversion.pieces("model.layers.1.mlp.experts.up_proj", (3, 8, 4)))
    up = {"minimax_m2": "block_sparse_moe.experts.{}.w3"}.get(model_type, "mlp.experts.{}.up_proj")
    sparse = [(f"model.layers.1.{up.format(i)}.weight", i) for i in range(3)]
    mixture = "moe" in model_type or model_type in ("deepseek_v3", "minimax_m2")
    whole = [("model.layers.1.mlp.experts.up_proj", None)]
    assert [(piece.name, piece.index) for piece in experts] == (sparse if mixture else whole)


def make_config(path: Path, impl: str, **hf_config: object) -> RunConfig:
    (path / "config.json").write_text(json.dumps(hf_config))
    config = RunConfig()
    config.model.path, config.model.impl = str(path), impl
    return config


def test_auto_takes_native_where_it_can_and_others_are_obeyed():
    config = RunConfig()
    assert choose_implementation(config, {"model_type": "llama"}) == "native"
    assert choose_implementation(config, {"model_type": "gpt2"}) == "hf"
    config.trainer.attn = "eager"
    assert choose_implementation(config, {"model_type": "llama"}) == "hf"
    config.trainer.attn, config.model.impl = "auto", "hf"
    assert choose_implementation(config, {"model_type": "llama"}) == "hf"


def test_native_is_refused_before_anything_starts_where_it_cannot_run(tmp_path):
    assert find_model_problems(make_config(tmp_path, "native", model_type="llama")) == []
    assert find_model_problems(make_config(tmp_path, "auto", model_type="gpt2")) == []
    config = make_config(tmp_path, "native", model_type="gpt2")
    config.trainer.attn = "eager"
    assert [str(problem) for problem in find_model_problems(config)] == [
        f"model.impl = 'native': expected auto or hf for this model, since gpt2 is not among {', '.join(MODULES)}",
        "trainer.attn = 'eager': expected auto, or another that packs documents",
    ]


def test_what_native_models_alone_can_do_is_refused_on_others(tmp_path):
    config = make_config(tmp_path, "hf", model_type="qwen3_moe", num_experts=8)
    assert find_model_problems(config) == []
    config.trainer.router_replay, config.lora.rank = True, 8
    assert [problem.key for problem in find_model_problems(config)] == ["trainer.router_replay", "lora.targets"]
    config.lora.targets.remove("experts")
    assert [problem.key for problem in find_model_problems(config)] == ["trainer.router_replay"]
    config.model.impl = "auto"
    assert find_model_problems(config) == []


def test_linear_attention_runs_natively_alone(tmp_path):
    linear = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    assert find_model_problems(make_config(tmp_path, "auto", model_type="qwen3_5_text", **linear)) == []
    for impl, model_type, obstacle in (("hf", "qwen3_5_text", "model.impl or trainer.attn ask for transformers"),
                                       ("auto", "olmo_hybrid", "olmo_hybrid is not among glm4_moe")):  # fmt: skip
        [problem] = find_model_problems(make_config(tmp_path, impl, model_type=model_type, **linear))
        assert problem.key == "model.path" and "whose state goes from document to document" in problem.expected
        assert obstacle in problem.expected


def test_what_a_model_that_sees_cannot_do_is_refused(tmp_path):
    config = make_config(tmp_path, "auto", model_type="qwen3_vl")
    config.lora.rank, config.model.freeze_vision, config.update.kv = 8, False, "keep"
    assert [problem.key for problem in find_model_problems(config)] == ["model.path", "lora.rank", "update.kv"]
    for key, value in {"limit_mm_per_prompt": {"image": 0}, "language_model_only": True}.items():
        config.inference.vllm[key] = value
        assert find_model_problems(config)[0].key == f"inference.vllm.{key}"
    config.inference.vllm.clear()
    (tmp_path / "preprocessor_config.json").write_text("{}")
    config.lora.rank, config.model.freeze_vision = 0, True
    assert find_model_problems(config) == []
    config.model.impl = "native"
    [problem] = find_model_problems(config)
    assert str(problem).startswith(
        "model.impl = 'native': expected auto or hf for this model, since qwen3_vl is not among"
    )
