"""What a model costs, from the dictionary of its config.json alone: parameters, FLOPs, bytes of KV cache.

Covers decoder-only transformers: dense and mixture-of-experts, grouped-query and latent attention, gated delta rules
between layers of attention. Of a composite (vision-language) config only the text model counts.
"""

from dataclasses import dataclass
from typing import Any

HFConfig = dict[str, Any]

PEAK_FLOPS = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
}
"""Dense bfloat16 FLOP/s by a part of the device's name, the more special name first; from the vendors' data sheets."""

_QKV_BIAS = ("qwen2", "qwen2_moe")
"""Model types whose query, key and value projections always have a bias."""
_NO_OUTPUT_BIAS = ("glm4_moe",)
"""Model types whose `attention_bias` leaves the output projection out."""
_GATED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Model types with a gate for each channel that attention gives."""
_HEAD_NORMS = ("qwen3", "qwen3_moe", "qwen3_vl_text", *_GATED)
"""Model types that normalise each query and key head."""


@dataclass(frozen=True)
class _Layer:
    """Parameters of one decoder layer: matrices that every token meets, all experts, the chosen ones, and the rest."""

    shared: int
    experts: int
    chosen_experts: int
    vectors: int


def param_count(hf_config: HFConfig) -> int:
    """All parameters; tied embeddings count once."""
    text = _text(hf_config)
    body = sum(layer.shared + layer.experts + layer.vectors for layer in _layers(text))
    return body + _outside(text)


def active_params(hf_config: HFConfig) -> int:
    """Parameters that one token uses, as in model names like 30B-A3B: of the routed experts only the chosen ones."""
    text = _text(hf_config)
    body = sum(layer.shared + layer.chosen_experts + layer.vectors for layer in _layers(text))
    return body + _outside(text)


def train_flops(hf_config: HFConfig, seq_lens: list[int], *, frozen: bool = False) -> float:
    """FLOPs of forward and backward over sequences of these lengths: three forwards, nothing recomputed. Where the
    matrices are frozen, as under adapters (whose own are left out), they have two forwards' worth.

    Two for each multiply-add of a matrix, the LM head too but not the embedding lookup; causal attention within each
    sequence costs `2 * heads * (d_qk + d_v)` for each of its n(n+1)/2 pairs (the accounting of PaLM, appendix B, with
    the mask and the true head dimension). A delta rule reads its state `heads * d_k * d_v` twice and writes it once for
    each token, whatever more its chunks compute.
    """
    text = _text(hf_config)
    matrices, linear = sum(layer.shared + layer.chosen_experts for layer in _layers(text)), linear_layers(text)
    per_token = 2 * (matrices + text["vocab_size"] * text["hidden_size"])
    per_pair = 2 * text["num_attention_heads"] * sum(_head_dims(text)) * (text["num_hidden_layers"] - linear)
    pairs, state = sum(n * (n + 1) // 2 for n in seq_lens), 6 * linear * _state(text) if linear else 0
    return ((2.0 if frozen else 3.0) * per_token + 3.0 * state) * sum(seq_lens) + 3.0 * per_pair * pairs


def linear_layers(hf_config: HFConfig) -> int:
    """Layers whose tokens are mixed by a state that one hands to the next, rather than by attention."""
    text = _text(hf_config)
    return sum(_is_linear(text, i) for i in range(text.get("num_hidden_layers") or 0))


def kv_bytes_per_token(hf_config: HFConfig, dtype_bytes: int) -> int:
    """Bytes of KV cache of one token, all layers; latent attention stores its latent and the rotary key only, linear
    attention nothing that grows with the tokens."""
    text = _text(hf_config)
    if text.get("kv_lora_rank"):
        values = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        values = 2 * _kv_heads(text) * _head_dim(text)
    return (text["num_hidden_layers"] - linear_layers(text)) * values * dtype_bytes


def root_params(hf_config: HFConfig) -> int:
    """Parameters outside the layers: embedding, LM head where it is its own, and the last norm."""
    return _outside(_text(hf_config))


def expert_params(hf_config: HFConfig) -> int:
    """Parameters of all routed experts."""
    return sum(experts for _, experts in layer_params(hf_config))


def layer_params(hf_config: HFConfig) -> list[tuple[int, int]]:
    """Parameters of each decoder layer: those of its routed experts left out, and of these."""
    return [(layer.shared + layer.vectors, layer.experts) for layer in _layers(_text(hf_config))]


@dataclass(frozen=True)
class Widths:
    """Channels of one token inside a decoder layer.

    `query`, `key` and `value` are of all heads together; `latent` is what latent attention keeps beside them, `mixed`
    what a gated delta rule does, and `single` what it keeps in float32. `feed_forward` is that of the gate, summed over
    the experts that a token meets, of which `routed` are routed ones.
    """

    hidden: int
    query: int
    key: int
    value: int
    out: int
    latent: int
    norms_heads: bool
    feed_forward: int
    routed: int
    mixed: int = 0
    single: int = 0
    norms_in_single: bool = False


def layer_widths(hf_config: HFConfig) -> list[Widths]:
    """Widths of each decoder layer, in order."""
    text = _text(hf_config)
    return [_widths(text, i) for i in range(text["num_hidden_layers"])]


def vocabulary(hf_config: HFConfig) -> int:
    """Rows of the LM head."""
    return _text(hf_config)["vocab_size"]


@dataclass(frozen=True)
class Divisions:
    """Sizes of a model that parallelism divides. `widths` are those of its dense and shared MLPs."""

    hidden: int
    heads: int
    kv_heads: int
    widths: list[int]
    experts: int
    expert_width: int


def divisions(hf_config: HFConfig) -> Divisions:
    """The sizes that parallelism divides; no experts in a dense model."""
    text = _text(hf_config)
    experts, width = _num_experts(text), text.get("moe_intermediate_size") or text["intermediate_size"]
    dense = not all(_is_sparse(text, i) for i in range(text["num_hidden_layers"])) if experts else True
    shared = text.get("shared_expert_intermediate_size") or width * (text.get("n_shared_experts") or 0)
    widths = [size for size in (text["intermediate_size"] if dense else 0, shared * bool(experts)) if size]
    return Divisions(text["hidden_size"], text["num_attention_heads"], _kv_heads(text), widths, experts, width)


def device_peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its name as CUDA gives it; None for one that is not in `PEAK_FLOPS`."""
    return next((flops for part, flops in PEAK_FLOPS.items() if _words(part) <= _words(name)), None)


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split())


def _text(hf_config: HFConfig) -> HFConfig:
    return hf_config.get("text_config", hf_config)


def _layers(text: HFConfig) -> list[_Layer]:
    kinds = [(_is_linear(text, i), _is_sparse(text, i)) for i in range(text["num_hidden_layers"])]
    layers = {kind: _layer(text, *kind) for kind in set(kinds)}
    return [layers[kind] for kind in kinds]


def _layer(text: HFConfig, linear: bool, sparse: bool) -> _Layer:
    mixer, vectors = _delta_net(text) if linear else _attention(text)
    vectors += 2 * text["hidden_size"]
    if not sparse:
        return _Layer(mixer + _gated(text, text["intermediate_size"]), 0, 0, vectors)
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    expert = _gated(text, width)
    always = mixer + _num_experts(text) * text["hidden_size"] + _shared_experts(text, width)
    return _Layer(always, _num_experts(text) * expert, text["num_experts_per_tok"] * expert, vectors)


def _delta_net(text: HFConfig) -> tuple[int, int]:
    """As `_attention`, for a gated delta rule; its convolution costs as much as a matrix of as many weights."""
    hidden, heads, (keys, values) = text["hidden_size"], text["linear_num_value_heads"], _linear_dims(text)
    channels = 2 * keys + values
    matrices = hidden * (channels + 2 * values + 2 * heads) + channels * text["linear_conv_kernel_dim"]
    return matrices, 2 * heads + text["linear_value_head_dim"]


def _linear_dims(text: HFConfig) -> tuple[int, int]:
    """Channels of all key heads, and of all value heads, of a gated delta rule."""
    return (text["linear_num_key_heads"] * text["linear_key_head_dim"],
            text["linear_num_value_heads"] * text["linear_value_head_dim"])  # fmt: skip


def _state(text: HFConfig) -> int:
    """Numbers in the state of a gated delta rule."""
    return text["linear_num_value_heads"] * text["linear_key_head_dim"] * text["linear_value_head_dim"]


def _is_linear(text: HFConfig, layer: int) -> bool:
    if text.get("layer_types"):
        return text["layer_types"][layer] == "linear_attention"
    return "linear_num_value_heads" in text and (layer + 1) % text.get("full_attention_interval", 4) != 0


def _attention(text: HFConfig) -> tuple[int, int]:
    """Weights of the matrices, and of biases and norms, of one attention block."""
    if text.get("kv_lora_rank"):
        return _latent_attention(text)
    hidden, heads, kv_heads, dim = text["hidden_size"], text["num_attention_heads"], _kv_heads(text), _head_dim(text)
    kind, bias = text.get("model_type"), text.get("attention_bias", False)
    gates, vectors = heads if kind in _GATED else 0, 0
    if bias or kind in _QKV_BIAS:
        vectors += (heads + gates + 2 * kv_heads) * dim
    if bias and kind not in _NO_OUTPUT_BIAS:
        vectors += hidden
    if kind in _HEAD_NORMS or (kind == "glm4_moe" and text.get("use_qk_norm")):
        vectors += 2 * dim
    if kind == "minimax_m2":
        vectors += (heads + kv_heads) * dim
    return hidden * (2 * heads + gates + 2 * kv_heads) * dim, vectors


def _latent_attention(text: HFConfig) -> tuple[int, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with a sparse indexer where there is one (V3.2)."""
    hidden, heads, kv_rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    query, rope = text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["qk_rope_head_dim"]
    q_rank, value = text.get("q_lora_rank"), text["v_head_dim"]
    matrices = hidden * (kv_rank + rope) + kv_rank * heads * (text["qk_nope_head_dim"] + value) + heads * value * hidden
    matrices += (hidden + heads * query) * q_rank if q_rank else hidden * heads * query
    vectors = kv_rank + (q_rank or 0)
    if text.get("index_head_dim"):
        index_heads, index_dim = text["index_n_heads"], text["index_head_dim"]
        matrices += q_rank * index_heads * index_dim + hidden * (index_dim + index_heads)
        vectors += 2 * index_dim
    return matrices, vectors


def _shared_experts(text: HFConfig, width: int) -> int:
    """Weights of the experts that every token meets, with their gate where there is one."""
    if text.get("shared_expert_intermediate_size"):
        return _gated(text, text["shared_expert_intermediate_size"]) + text["hidden_size"]
    return _gated(text, width * (text.get("n_shared_experts") or text.get("num_shared_experts") or 0))


def _is_sparse(text: HFConfig, layer: int) -> bool:
    """Whether a layer has experts; the rules of the known families."""
    if not _num_experts(text):
        return False
    if text.get("mlp_layer_types"):
        return text["mlp_layer_types"][layer] == "sparse"
    if layer < text.get("first_k_dense_replace", 0) or layer in (text.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % text.get("decoder_sparse_step", 1) == 0


def _outside(text: HFConfig) -> int:
    """Embedding, LM head where it is its own, and the last norm."""
    matrices = 1 if text.get("tie_word_embeddings", False) else 2
    return matrices * text["vocab_size"] * text["hidden_size"] + text["hidden_size"]


def _gated(text: HFConfig, width: int) -> int:
    return 3 * text["hidden_size"] * width


def _widths(text: HFConfig, layer: int) -> Widths:
    feed_forward, routed = _feed_forward(text, layer)
    if _is_linear(text, layer):
        return _linear_widths(text, feed_forward, routed)
    heads, (query, value), latent = text["num_attention_heads"], _head_dims(text), text.get("kv_lora_rank") or 0
    kv_heads, kind = heads if latent else _kv_heads(text), text.get("model_type")
    return Widths(
        hidden=text["hidden_size"],
        query=heads * query * (2 if kind in _GATED else 1),
        key=kv_heads * query,
        value=kv_heads * value,
        out=heads * value,
        latent=latent and latent + text["qk_rope_head_dim"] + (text.get("q_lora_rank") or 0),
        norms_heads=kind in _HEAD_NORMS or (kind == "glm4_moe" and bool(text.get("use_qk_norm"))),
        feed_forward=feed_forward,
        routed=routed,
        norms_in_single=kind in _GATED,
    )


def _linear_widths(text: HFConfig, feed_forward: int, routed: int) -> Widths:
    """Of the kernels of flash-linear-attention: what is convolved is kept before and, with keys for every head, after,
    and the inverse that a chunk of 64 tokens has for each head; gate and norm have two channels each in float32."""
    (keys, values), heads = _linear_dims(text), text["linear_num_value_heads"]
    return Widths(
        hidden=text["hidden_size"],
        query=keys,
        key=keys,
        value=values,
        out=values,
        latent=0,
        norms_heads=False,
        feed_forward=feed_forward,
        routed=routed,
        mixed=2 * heads * text["linear_key_head_dim"] + values + 64 * heads,
        single=4 * values,
        norms_in_single=True,
    )


def _feed_forward(text: HFConfig, layer: int) -> tuple[int, int]:
    """Channels of the gates of a token's experts, or of the dense MLP, and the number of routed experts."""
    if not _is_sparse(text, layer):
        return text["intermediate_size"], 0
    width, routed = text.get("moe_intermediate_size") or text["intermediate_size"], text["num_experts_per_tok"]
    return routed * width + _shared_experts(text, width) // (3 * text["hidden_size"]), routed


def _num_experts(text: HFConfig) -> int:
    return text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0


def _head_dim(text: HFConfig) -> int:
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def _head_dims(text: HFConfig) -> tuple[int, int]:
    """Dimensions of a query-key head and of a value head."""
    if text.get("kv_lora_rank"):
        return text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["v_head_dim"]
    return _head_dim(text), _head_dim(text)


def _kv_heads(text: HFConfig) -> int:
    return text.get("num_key_value_heads") or text["num_attention_heads"]
