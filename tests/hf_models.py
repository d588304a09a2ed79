"""Tiny models of types that run in transformers alone."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models_support import SHAPE

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "layer_types": ["linear_attention", "full_attention", "linear_attention"]}  # fmt: skip
CHOICE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
          "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4,
          "first_k_dense_replace": 1, **CHOICE}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear attention": ("qwen3_5_text", LINEAR),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "state spaces": ("nemotron_h", {"hybrid_override_pattern": "M*E", "mamba_num_heads": 4, "mamba_head_dim": 16,
                                    "ssm_state_size": 8, "n_groups": 1, "n_routed_experts": 4,
                                    "moe_shared_expert_intermediate_size": 16, **CHOICE}),
    "buffers of the whole": ("falcon_h1", {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
                                           "mamba_d_state": 8, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "a mask alone": ("stablelm", {}),
    "an index": ("glm_moe_dsa", {**LATENT, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}),
    "divided logits": ("granite", {"logits_scaling": 8.0}),
    "scaled logits": ("cohere", {"logit_scale": 0.25}),
    "soft caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0, "sliding_window": 4}),
    "scaled embeddings": ("gemma3_text", {"sliding_window": 4}),
    "windows": ("mistral", {"sliding_window": 4}),
    "sinks": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    "masks without documents": ("afmoe", {"num_experts": 4, "num_dense_layers": 1, "sliding_window": 4, **CHOICE}),
    "latent attention": ("deepseek_v3", LATENT),
    "renamed mixtures": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "native elsewhere": ("qwen3_moe", {"num_experts": 4, **CHOICE}),
}  # fmt: skip
"""By what is special in them: model type, and what the configuration has beside `SHAPE`."""


def save_model(name: str, path: Path) -> PreTrainedModel:
    """Write a random model of transformers to `path` and return it."""
    kind, others = MODELS[name]
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SHAPE, **others})
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    hf.save_pretrained(path)
    return hf
