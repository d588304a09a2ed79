"""Model costs against transformers' own models and against counts by hand."""

import json

import pytest

from prime_hpc.models import spec
from prime_hpc.models.families import load_family
from tests import hf_models
from tests.models_support import SHAPE

BASE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32)  # fmt: skip
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24)
MLA = dict(BASE, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=40, qk_rope_head_dim=8, qk_nope_head_dim=24,
           v_head_dim=20, n_group=1, topk_group=1, n_routed_experts=4, n_shared_experts=2,
           **MOE)  # fmt: skip

DELTA = dict(linear_num_key_heads=2, linear_key_head_dim=16, linear_num_value_heads=4, linear_value_head_dim=24,
             linear_conv_kernel_dim=3,
             layer_types=["linear_attention", "full_attention", "linear_attention"])  # fmt: skip
MODELS = {
    "afmoe": dict(BASE, num_experts=4, num_shared_experts=2, num_dense_layers=1, attention_bias=True, **MOE),
    "gemma": BASE,
    "gemma3_text": BASE,
    "gemma3_text, own head": dict(BASE, tie_word_embeddings=False),
    "llama": BASE,
    "llama, tied": dict(BASE, tie_word_embeddings=True),
    "llama, biases": dict(BASE, attention_bias=True),
    "qwen2": {k: v for k, v in BASE.items() if k != "head_dim"},
    "qwen3": BASE,
    "qwen3_5_text": dict(BASE, **DELTA),
    "qwen3_5_text, biases": dict(BASE, attention_bias=True, **DELTA),
    "qwen3_5_moe_text": dict({k: v for k, v in BASE.items() if k != "intermediate_size"}, num_experts=4,
                             shared_expert_intermediate_size=40, **MOE, **DELTA),
    "qwen3_next": dict(BASE, num_experts=4, shared_expert_intermediate_size=40, **MOE, **DELTA),
    "qwen3_moe": dict(BASE, num_experts=4, **MOE),
    "qwen3_moe, some dense": dict(BASE, num_experts=4, mlp_only_layers=[1], decoder_sparse_step=1, **MOE),
    "qwen2_moe": dict({k: v for k, v in BASE.items() if k != "head_dim"}, num_experts=4,
                      shared_expert_intermediate_size=40, **MOE),
    "mixtral": dict(BASE, num_local_experts=4, num_experts_per_tok=2),
    "mistral": BASE,
    "ministral": BASE,
    "minimax_m2": dict(BASE, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": dict(BASE, n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1, use_qk_norm=True,
                     attention_bias=True, **MOE),
    "deepseek_v3": dict(MLA, first_k_dense_replace=1),
    "deepseek_v3, full queries": dict(MLA, first_k_dense_replace=2, q_lora_rank=None),
    "glm_moe_dsa": dict(MLA, index_topk=8, index_n_heads=2, index_head_dim=16),
    "glm_moe_dsa, shared choices": dict(MLA, index_topk=8, index_n_heads=2, index_head_dim=16,
                                        indexer_types=["full", "shared", "shared"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_param_count_is_that_of_the_model(name):
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[name.split(",")[0]](**MODELS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    written = json.loads(config.to_json_string(use_diff=False))
    assert spec.param_count(written) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_active_params_leave_out_the_experts_that_are_not_chosen():
    config = dict(MODELS["qwen3_moe"], model_type="qwen3_moe")
    idle = 3 * (4 - 2) * 3 * 64 * 24
    assert spec.active_params(config) == spec.param_count(config) - idle
    dense = dict(BASE, model_type="qwen3")
    assert spec.active_params(dense) == spec.param_count(dense)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_count_under_every_name(name):
    experts = {name: 4, **MOE}
    assert spec.param_count(dict(BASE, **experts)) == spec.param_count(dict(BASE, num_experts=4, **MOE))
    assert spec.train_flops(dict(BASE, **experts), [8]) == spec.train_flops(dict(BASE, num_experts=4, **MOE), [8])


def test_flops_of_a_dense_model_by_hand():
    attention = 64 * 4 * 32 + 2 * (64 * 2 * 32) + 4 * 32 * 64
    matrices = 3 * (attention + 3 * 64 * 96) + 128 * 64
    pairs = 5 * 6 // 2 + 2 * 3 // 2
    scores_and_values = 3 * (2 * 2 * 4 * 32) * pairs
    assert spec.train_flops(BASE, [5, 2]) == 3 * (2 * matrices * 7 + scores_and_values)
    assert spec.train_flops(BASE, [5, 2], frozen=True) == 2 * 2 * matrices * 7 + 3 * scores_and_values


def test_flops_of_experts_by_hand():
    attention = 64 * 4 * 32 + 2 * (64 * 2 * 32) + 4 * 32 * 64
    router, chosen, shared = 64 * 4, 2 * 3 * 64 * 24, 3 * 64 * 24
    dense = 3 * 64 * 96
    matrices = 3 * attention + dense + 2 * (router + chosen + shared) + 128 * 64
    config = dict(BASE, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, **MOE)
    assert spec.train_flops(config, [1]) == 3 * (2 * matrices + 3 * (2 * 2 * 4 * 32))


def test_flops_of_a_delta_rule_by_hand():
    keys, values = 2 * 16, 4 * 24
    linear = 64 * (2 * keys + 2 * values + 2 * 4) + 3 * (2 * keys + values) + values * 64
    attention = 64 * 4 * 32 * 2 + 2 * (64 * 2 * 32) + 4 * 32 * 64  # queries have gates
    matrices = 2 * linear + attention + 3 * 3 * 64 * 96 + 128 * 64
    states, pairs = 2 * 3 * 2 * 4 * 16 * 24 * 7, 2 * 2 * 4 * 32 * (5 * 6 // 2 + 2 * 3 // 2)
    config = dict(BASE, model_type="qwen3_5_text", **DELTA)
    assert spec.train_flops(config, [5, 2]) == 3 * (2 * matrices * 7 + states + pairs)
    assert spec.train_flops(config, [5, 2], frozen=True) == 2 * 2 * matrices * 7 + 3 * (states + pairs)
    assert spec.kv_bytes_per_token(config, 2) == 1 * 2 * 2 * 32 * 2
    by_interval = {key: value for key, value in config.items() if key != "layer_types"} | {"full_attention_interval": 2}
    assert spec.train_flops(by_interval, [5, 2]) == spec.train_flops(config, [5, 2])


def test_flops_of_latent_attention_count_both_head_dimensions():
    def pairs_cost(config: dict) -> float:
        return spec.train_flops(config, [3]) - 3 * spec.train_flops(config, [1])

    # three single tokens have 3 pairs, one sequence of three has 6
    assert pairs_cost(MLA) == 3 * 3 * 2 * 4 * (32 + 20) * 3


WINDOWS = {
    "afmoe": ({"global_attn_every_n_layers": 2, "num_experts": 4, **MOE}, [1024, None, 1024]),
    "gemma3_text": ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8]),
    "mistral": ({}, [4096] * 3),
    "mistral, none": ({"sliding_window": None}, [None] * 3),
    "ministral": ({"sliding_window": 8}, [8] * 3),
    "ministral, some": ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, [None, 4096, None]),
    "qwen2": ({"sliding_window": 8, "max_window_layers": 1}, [None] * 3),
    "qwen3": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, [None, 8, 8]),
    "qwen3_moe": ({"use_sliding_window": True, "num_experts": 4, **MOE}, [4096] * 3),
    "llama": ({"sliding_window": 8}, [None] * 3),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("defaults", [True, False], ids=["all keys", "no defaults"])
def test_windows_are_those_of_the_layers(name, defaults):
    from transformers import CONFIG_MAPPING

    others, windows = WINDOWS[name]
    model_type = name.split(",")[0]
    config = CONFIG_MAPPING[model_type](**BASE, **others)
    written = json.loads(config.to_json_string(use_diff=not defaults))
    assert spec.layer_windows(written) == windows
    assert spec.layer_windows({**BASE, **others, "model_type": model_type}) == windows
    layers = load_family(model_type).build(config).model.layers
    assert [block.self_attn.window for block in layers] == windows


def test_flops_within_windows_by_hand():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    sliding = dict(BASE, model_type="ministral", sliding_window=3, layer_types=types)
    beyond = (1 + 2) + 0  # of 5 tokens the last two do not see one and two; of 3 tokens each sees all before it
    assert spec.train_flops(BASE, [5, 3]) - spec.train_flops(sliding, [5, 3]) == 3 * 2 * 4 * (32 + 32) * 2 * beyond


def test_tied_head_costs_as_much_as_its_own():
    assert spec.train_flops(dict(BASE, tie_word_embeddings=True), [9]) == spec.train_flops(BASE, [9])


def test_kv_cache():
    assert spec.kv_bytes_per_token(BASE, 2) == 3 * 2 * 2 * 32 * 2
    assert spec.kv_bytes_per_token(MLA, 2) == 3 * (16 + 8) * 2
    assert spec.kv_bytes_per_token({"text_config": BASE, "vision_config": {}}, 4) == 3 * 2 * 2 * 32 * 4


ELSEWHERE = {
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["mamba", "attention", "mamba"]},
    "kimi_linear": {},
    "minimax": {},
}
"""Models of transformers with linear attention that is no gated delta rule."""


@pytest.mark.parametrize("name", [*hf_models.MODELS, *ELSEWHERE])
def test_whatever_transformers_runs_has_a_cost(name):
    from transformers import AutoConfig

    kind, others = hf_models.MODELS.get(name) or (name, ELSEWHERE[name])
    config = AutoConfig.for_model(kind, **{**SHAPE, **others}).to_dict()
    matrices = 2 * 3 * spec.active_params(config)
    assert matrices / 4 < spec.train_flops(config, [1]) < 2 * matrices
    assert spec.kv_bytes_per_token(config, 2) > 0 and len(spec.layer_widths(config)) == 3
    assert spec.param_count({"model_type": kind, "text_config": config}) == spec.param_count(config)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_peak_flops(name, peak):
    assert spec.device_peak_flops(name) == peak
