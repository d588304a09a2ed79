"""What a model of transformers needs of those who run it, from its config.json alone. Importing this needs no torch."""

from prime_hpc.models.spec import HFConfig, text_of

STATEFUL = (
    "bamba", "falcon_h1", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "minimax",
    "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "zamba", "zamba2", "zaya",
)  # fmt: skip
"""Model types with convolutions or linear attention, where `layer_types` do not say which layers have them."""
UNMASKED = ("afmoe", "gpt_oss", "xglm")
"""Model types whose masks, in transformers, know of no documents."""
MASKABLE = ("full_attention", "attention", "sliding_attention", "chunked_attention")
"""Types of layers that a mask confines to documents."""
WINDOWS = ("sliding_attention", "chunked_attention")
SINKS = ("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")
"""Model types whose attention has sinks."""
MASK_ALONE = ("minimax", "nemotron", "recurrent_gemma", "stablelm", "xglm")
"""Model types whose attention, in transformers, heeds nothing but a mask."""
ELSEWHERE = (
    "biogpt", "bloom", "codegen", "ctrl", "falcon", "falcon_mamba", "fuyu", "gemma3", "gemma4", "gemma4_unified",
    "got_ocr2", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "hrm_text", "llama4",
    "llama4_text", "mamba", "mamba2", "mllama", "mpt", "openai-gpt", "opt", "rwkv", "xlnet", "xlstm",
)  # fmt: skip
"""Model types whose blocks are not `model.layers` in transformers."""

TOWERED = ("qwen3_5", "qwen3_5_moe")
"""Image-text models whose text model trains once it is taken out."""
TAKEN_OUT = "`python -m tools.text_model FOLDER --out TEXT` takes the text model out"


def runs_one_by_one(hf_config: HFConfig) -> bool:
    """Whether documents of a row would see one another: a layer hands something from token to token that no mask of
    attention stops (linear attention, a convolution, an index over the tokens of a row), or there is no such mask."""
    text = text_of(hf_config)
    kind, layer_types = text.get("model_type"), text.get("layer_types") or text.get("layers_block_type")
    if kind in UNMASKED or text.get("index_topk") or any(layer not in MASKABLE for layer in layer_types or ()):
        return True
    return layer_types is None and kind in STATEFUL


def has_windows(hf_config: HFConfig) -> bool:
    """Whether attention reaches over a part of a document only."""
    text = text_of(hf_config)
    if text.get("layer_types"):
        return any(kind in WINDOWS for kind in text["layer_types"])
    return bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False


def needs_eager(hf_config: HFConfig) -> str | None:
    """Why no attention but the eager one of transformers gives the model's own numbers; None where others do."""
    text = text_of(hf_config)
    if text.get("attn_logit_softcapping"):
        return "its attention scores have a soft cap"
    if text.get("model_type") in SINKS:
        return "its attention has sinks"
    if text.get("model_type") in MASK_ALONE:
        return "its attention heeds nothing but a mask"
    return "its attention chooses among tokens by an index" if text.get("index_topk") else None


def logit_scale(hf_config: HFConfig) -> float:
    """The factor between the product of the LM head and the logits, but for a soft cap."""
    text = text_of(hf_config)
    divisor = text.get("logits_scaling") or 1.0
    factor = text.get("logit_scale") or text.get("lm_head_multiplier") or 1.0
    return factor * (divisor if text.get("model_type") == "hyperclovax" else 1.0 / divisor)


def logit_cap(hf_config: HFConfig) -> float | None:
    """The soft cap of logits: cap * tanh(logit / cap)."""
    return text_of(hf_config).get("final_logit_softcapping")
