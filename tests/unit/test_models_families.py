"""Which implementation a model gets, and why."""

import json
from pathlib import Path

import pytest

from prime_hpc.config.run import RunConfig
from prime_hpc.models.families import (
    MODULES,
    choose_implementation,
    find_model_problems,
    find_obstacle,
    load_family,
    runs_one_by_one,
)

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
    assert find_model_problems(make_config(tmp_path, "auto", model_type="olmo2")) == []
    config = make_config(tmp_path, "native", model_type="olmo2")
    config.trainer.attn = "eager"
    assert [str(problem) for problem in find_model_problems(config)] == [
        f"model.impl = 'native': expected auto or hf for this model, since olmo2 is not among {', '.join(MODULES)}",
        "trainer.attn = 'eager': expected auto, or another that packs documents",
    ]


def test_what_native_models_alone_can_do_is_refused_on_others(tmp_path):
    config = make_config(tmp_path, "hf", model_type="qwen3_moe", num_experts=8)
    assert find_model_problems(config) == []
    config.trainer.router_replay, config.lora.rank = True, 8
    assert [problem.key for problem in find_model_problems(config)] == ["trainer.router_replay", "lora.targets"]
    config.lora.targets.remove("experts")
    assert [problem.key for problem in find_model_problems(config)] == ["trainer.router_replay"]
    config.trainer.router_replay, config.trainer.linear_attn = False, "torch"
    assert [problem.key for problem in find_model_problems(config)] == ["trainer.linear_attn"]
    config.model.impl = "auto"
    assert find_model_problems(config) == []


def test_linear_attention_runs_natively_or_one_by_one(tmp_path):
    linear = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    facts = {"model_type": "qwen3_5_text", **linear}
    for impl, one_by_one in (("auto", False), ("hf", True)):
        config = make_config(tmp_path, impl, **facts)
        assert find_model_problems(config) == []
        assert runs_one_by_one(config, facts) == one_by_one


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


REFUSED = {
    "a decoder whose blocks are `model.layers` in transformers, which those of gpt2 are not": {"model_type": "gpt2"},
    "a text model or one of type qwen3_vl, as no other that sees is trained, such as gemma3": {
        "model_type": "gemma3",
        "vision_config": {},
    },
    "weights in bfloat16 or float32, as quantised ones are not trained: dequantise them first": {
        "model_type": "deepseek_v3",
        "quantization_config": {"quant_method": "fp8"},
    },
    "auto or eager, since its attention scores have a soft cap": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
    },
    "auto or eager, since its attention has sinks": {"model_type": "gpt_oss"},
    "auto or eager, since its attention chooses among tokens by an index": {
        "model_type": "glm_moe_dsa",
        "index_topk": 2048,
    },
}


@pytest.mark.parametrize("expected", REFUSED)
def test_what_does_not_train_rightly_in_transformers_is_refused_where_something_trains(expected, tmp_path):
    config = make_config(tmp_path, "hf", **REFUSED[expected])
    config.trainer.attn = "sdpa"
    assert [problem.expected for problem in find_model_problems(config)] == [expected]
    config.mode = "serve"
    assert find_model_problems(config) == []


ONE_BY_ONE = {
    True: [{"model_type": "qwen3_next"}, {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
           {"model_type": "new", "text_config": {"layer_types": ["linear_attention", "full_attention"]}},
           {"model_type": "gpt_oss", "layer_types": ["sliding_attention"]}, {"model_type": "axk2", "index_topk": 8}],
    False: [{"model_type": "qwen3"}, {"model_type": "olmo3", "layer_types": ["sliding_attention", "full_attention"]},
            {"model_type": "lfm2", "layer_types": ["full_attention"]}],
}  # fmt: skip


@pytest.mark.parametrize("expected", ONE_BY_ONE)
def test_documents_run_one_by_one_where_no_mask_parts_them(expected, tmp_path):
    for hf_config in ONE_BY_ONE[expected]:
        config = make_config(tmp_path, "hf", **hf_config)
        assert runs_one_by_one(config, hf_config) == expected, hf_config
        config.lora.rank, config.lora.adapters, config.lora.targets = 8, ["a", "b"], ["q_proj"]
        assert [problem.key for problem in find_model_problems(config)] == ["lora.adapters"] * expected
