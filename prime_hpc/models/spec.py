"""What a model costs, from the dictionary of its config.json alone: parameters, FLOPs, bytes of KV cache.

Covers decoder-only transformers: dense and mixture-of-experts, grouped-query and latent attention, gated delta rules
between layers of attention. What else mixes tokens (state spaces, convolutions, other linear attention) is taken for
attention. Of a composite (vision-language) config only the text model counts.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
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
_GATED_QUERIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Model types whose query projection makes a gate for each channel of the output, too."""
_HEAD_NORMS = ("afmoe", "gemma3_text", "qwen3", "qwen3_moe", "qwen3_vl_text", *_GATED_QUERIES)
"""Model types that normalise each query and key head."""
_VECTOR_NORMS = ("minimax_m2",)
"""Model types that normalise queries and keys over all heads together."""
_GATED = ("afmoe",)
"""Model types with a gate on the output of attention."""
_SANDWICHED = ("afmoe", "gemma3_text")
"""Model types with norms on both sides of attention and MLP."""
_ZERO_CENTRED = ("gemma", "gemma2", "gemma3_text", *_GATED_QUERIES)
"""Model types whose norms multiply by 1 + weight, in float32."""
_TIED = ("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "lfm2", "lfm2_moe", "recurrent_gemma")
"""Model types whose embeddings are tied where a configuration does not say so."""
WINDOWS = {
    "afmoe": 1024,
    **dict.fromkeys(("gemma3_text", "mistral", "ministral", "qwen2", "qwen3", "qwen3_moe"), 4096),
}
"""Model types with sliding windows, and their size where a configuration leaves it out."""
_EVERY = {"afmoe": ("global_attn_every_n_layers", 4), "gemma3_text": ("sliding_window_pattern", 6)}
"""Of which every n-th layer has no window: the key for n, and its default."""


@dataclass(frozen=True)
class _Layer:
    """Parameters of one decoder layer: matrices that every token meets, all experts, the chosen ones, the rest, and a
    frozen indexer's."""

    shared: int
    experts: int
    chosen_experts: int
    vectors: int
    indexer: int = 0


def param_count(hf_config: HFConfig) -> int:
    """All parameters; tied embeddings count once."""
    text = _text(hf_config)
    body = sum(layer.shared + layer.experts + layer.vectors + layer.indexer for layer in _layers(text))
    return body + _outside(text)


def active_params(hf_config: HFConfig) -> int:
    """Parameters that one token uses, as in model names like 30B-A3B: of the routed experts only the chosen ones."""
    text = _text(hf_config)
    body = sum(layer.shared + layer.chosen_experts + layer.vectors + layer.indexer for layer in _layers(text))
    return body + _outside(text)


def train_flops(hf_config: HFConfig, seq_lens: list[int], *, frozen: bool = False) -> float:
    """FLOPs of forward and backward over sequences of these lengths: three forwards, nothing recomputed. Where the
    matrices are frozen, as under adapters (whose own are left out), they have two forwards' worth.

    Two for each multiply-add of a matrix, the LM head too but not the embedding lookup; causal attention within each
    sequence costs `2 * heads * (d_qk + d_v)` for each of its n(n+1)/2 pairs, or of those within a layer's window (the
    accounting of PaLM, appendix B, with the mask and the true head dimension). Where an indexer chooses keys, a token
    has no more pairs than it chooses, and its indexer, which is frozen, costs a forward over all pairs. A delta rule
    reads its state `heads * d_k * d_v` twice and writes it once for each token, whatever more its chunks compute.
    """
    text = _text(hf_config)
    matrices, linear = sum(layer.shared + layer.chosen_experts for layer in _layers(text)), linear_layers(text)
    per_token = 2 * (matrices + text["vocab_size"] * text["hidden_size"])
    per_pair = 2 * text["num_attention_heads"] * sum(_head_dims(text))
    top_k, attends = text.get("index_topk") or max(seq_lens), text["num_hidden_layers"] - linear
    windows = {None: attends} if linear else Counter(layer_windows(text))
    pairs = sum(layers * _pairs(n, min(n, window or top_k)) for window, layers in windows.items() for n in seq_lens)
    choosing = _choice_flops(text, seq_lens) if top_k < max(seq_lens) else 0
    state = 6 * linear * _state(text) if linear else 0
    per_token = (2.0 if frozen else 3.0) * per_token + 3.0 * state
    return per_token * sum(seq_lens) + 3.0 * per_pair * pairs + choosing


def linear_layers(hf_config: HFConfig) -> int:
    """Layers whose tokens are mixed by a state that one hands to the next, rather than by attention."""
    text = _text(hf_config)
    return sum(_is_linear(text, i) for i in range(text.get("num_hidden_layers") or 0))


def _choice_flops(text: HFConfig, seq_lens: list[int]) -> int:
    """Of the indexers, which run forward only, over all pairs of a row that has a document longer than the choice."""
    indexers = [layer.indexer for layer in _layers(text) if layer.indexer]
    per_pair = 2 * text["index_n_heads"] * text["index_head_dim"] * len(indexers)
    return 2 * sum(indexers) * sum(seq_lens) + per_pair * sum(_pairs(n, n) for n in seq_lens)


def layer_windows(hf_config: HFConfig) -> list[int | None]:
    """For each layer, how many tokens a token sees, itself the last; None where all of its past."""
    text = _text(hf_config)
    window = text.get("sliding_window", WINDOWS.get(text.get("model_type", "")))
    return [window if _slides(text, i) else None for i in range(text["num_hidden_layers"])]


def _slides(text: HFConfig, layer: int) -> bool:
    """The rules of the known families."""
    kind = text.get("model_type")
    if kind not in WINDOWS:
        return False
    if text.get("layer_types"):
        return text["layer_types"][layer] == "sliding_attention"
    if kind in ("mistral", "ministral"):
        return True
    if kind in _EVERY:
        return (layer + 1) % text.get(*_EVERY[kind]) != 0
    first = 0 if kind == "qwen3_moe" else text.get("max_window_layers", 28)
    return bool(text.get("use_sliding_window")) and layer >= first


def _pairs(n: int, most: int) -> int:
    """Of a token and one before it or itself among n tokens, where a token has `most` of them at most."""
    return most * (most + 1) // 2 + (n - most) * most


def kv_bytes_per_token(hf_config: HFConfig, dtype_bytes: int) -> int:
    """Bytes of KV cache of one token, all layers; latent attention stores its latent and the rotary key only, linear
    attention nothing that grows with the tokens. Layers with sliding windows count in full, though an engine may forget
    what lies before the window."""
    text = _text(hf_config)
    if text.get("kv_lora_rank"):
        values = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        values = 2 * _kv_heads(text) * _head_dim(text)
    return (text["num_hidden_layers"] - linear_layers(text)) * values * dtype_bytes + _indexer_bytes(text)


def _indexer_bytes(text: HFConfig) -> int:
    """Of the keys of one token by which indexers choose: in FP8, with a scale in float32 for 128 channels each."""
    dim = text.get("index_head_dim") or 0
    return sum(_chooses(text, i) for i in range(text["num_hidden_layers"])) * (dim + 4 * ceil(dim / 128))


def state_bytes(hf_config: HFConfig, dtype_bytes: int) -> int:
    """Bytes that an engine keeps of one sequence, however long: states of delta rules in float32, and the tokens that
    their convolutions look back at."""
    text, linear = _text(hf_config), linear_layers(hf_config)
    if not linear:
        return 0
    keys, values = _linear_dims(text)
    return linear * (4 * _state(text) + (text["linear_conv_kernel_dim"] - 1) * (2 * keys + values) * dtype_bytes)


def zero_centred_norms(hf_config: HFConfig) -> bool:
    """Whether norms of hidden states and heads multiply by 1 + weight."""
    return _text(hf_config).get("model_type") in _ZERO_CENTRED


def root_params(hf_config: HFConfig) -> int:
    """Parameters outside the layers: embedding, LM head where it is its own, and the last norm."""
    return _outside(_text(hf_config))


def expert_params(hf_config: HFConfig) -> int:
    """Parameters of all routed experts."""
    return sum(experts for _, experts in layer_params(hf_config))


def layer_params(hf_config: HFConfig) -> list[tuple[int, int]]:
    """Parameters of each decoder layer: those of its routed experts left out, and of these."""
    return [(layer.shared + layer.vectors + layer.indexer, layer.experts) for layer in _layers(_text(hf_config))]


@dataclass(frozen=True)
class Widths:
    """Channels of one token inside a decoder layer.

    `query`, `key` and `value` are of all heads together; `latent` is what latent attention keeps beside them, `gate` is
    that of the output, `mixed` what a gated delta rule keeps beside them, and `single` what it keeps in float32.
    `feed_forward` is that of the gate of the MLP, summed over the experts that a token meets, of which `routed` are
    routed ones.
    """

    hidden: int
    query: int
    key: int
    value: int
    out: int
    latent: int
    gate: int
    norms: int
    """Norms of the hidden states."""
    norms_heads: bool
    norms_vectors: bool
    """Queries and keys are normalised over all heads together."""
    feed_forward: int
    routed: int
    mixed: int = 0
    single: int = 0
    norms_in_single: bool = False
    absorbed: int = 0
    """Queries and outputs that the heads' matrices went to."""
    choice: int = 0
    """Keys that its indexer chooses."""
    shared_choice: int = 0
    """Those of them that the next layer takes, too."""


def layer_widths(hf_config: HFConfig, *, chosen: bool = False) -> list[Widths]:
    """Widths of each decoder layer, in order; where indexers choose among the keys, if `chosen`."""
    text = _text(hf_config)
    widths = [_widths(text, i) for i in range(text["num_hidden_layers"])]
    return [_over_chosen(text, i, whole) for i, whole in enumerate(widths)] if chosen else widths


def _over_chosen(text: HFConfig, layer: int, whole: Widths) -> Widths:
    """Those of a layer that reads latents rather than the keys and values that are made of them for every head."""
    absorbed = text["num_attention_heads"] * (2 * text["kv_lora_rank"] + text["qk_rope_head_dim"])
    choice = _chooses(text, layer) * text["index_topk"]
    shared = layer + 1 < text["num_hidden_layers"] and not _chooses(text, layer + 1)
    return replace(whole, key=0, value=0, absorbed=absorbed, choice=choice, shared_choice=shared * choice)


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
    shared = text.get("shared_expert_intermediate_size") or width * _num_shared(text)
    widths = [size for size in (text["intermediate_size"] if dense else 0, shared * bool(experts)) if size]
    return Divisions(text["hidden_size"], text["num_attention_heads"], _kv_heads(text), widths, experts, width)


def device_peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its name as CUDA gives it; None for one that is not in `PEAK_FLOPS`."""
    return next((flops for part, flops in PEAK_FLOPS.items() if _words(part) <= _words(name)), None)


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split())


def text_of(hf_config: HFConfig) -> HFConfig:
    """The configuration of the text model."""
    return hf_config.get("text_config") or hf_config


def _text(hf_config: HFConfig) -> HFConfig:
    """With the number of layers, which some configurations leave to a list of them."""
    text = text_of(hf_config)
    if "num_hidden_layers" in text or not text.get("layers_block_type"):
        return text
    return {**text, "num_hidden_layers": len(text["layers_block_type"])}


def _layers(text: HFConfig) -> list[_Layer]:
    kinds = [(_is_linear(text, i), _is_sparse(text, i)) for i in range(text["num_hidden_layers"])]
    layers = {kind: _layer(text, *kind) for kind in set(kinds)}
    indexers = (_indexer(text, i) for i in range(len(kinds)))
    return [replace(layers[kind], vectors=layers[kind].vectors + norm, indexer=matrices)
            for kind, (matrices, norm) in zip(kinds, indexers, strict=True)]  # fmt: skip


def _layer(text: HFConfig, linear: bool, sparse: bool) -> _Layer:
    mixer, vectors = _delta_net(text) if linear else _attention(text)
    vectors += _norms(text) * text["hidden_size"]
    if not sparse:
        return _Layer(mixer + _gated(text, text["intermediate_size"]), 0, 0, vectors)
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    expert = _gated(text, width)
    always = mixer + _num_experts(text) * text["hidden_size"] + _shared_experts(text, width)
    return _Layer(always, _num_experts(text) * expert, _experts_per_token(text) * expert, vectors)


def _norms(text: HFConfig) -> int:
    """Norms of the states in a layer."""
    return 4 if text.get("model_type") in _SANDWICHED else 2


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
    """Whether a layer has a gated delta rule."""
    sized = bool(text.get("linear_num_value_heads"))
    if text.get("layer_types"):
        known = sized or text.get("model_type") in _GATED_QUERIES
        return known and text["layer_types"][layer] == "linear_attention"
    return sized and (layer + 1) % text.get("full_attention_interval", 4) != 0


def _attention(text: HFConfig) -> tuple[int, int]:
    """Weights of the matrices, and of biases and norms, of one attention block."""
    if text.get("kv_lora_rank"):
        return _latent_attention(text)
    hidden, heads, kv_heads, dim = text["hidden_size"], text["num_attention_heads"], _kv_heads(text), _head_dim(text)
    kind, bias = text.get("model_type"), text.get("attention_bias", False)
    gates, vectors = heads if kind in _GATED_QUERIES else 0, 0
    if bias or kind in _QKV_BIAS:
        vectors += (heads + gates + 2 * kv_heads) * dim
    if bias and kind not in _NO_OUTPUT_BIAS:
        vectors += hidden
    if kind in _HEAD_NORMS or (kind == "glm4_moe" and text.get("use_qk_norm")):
        vectors += 2 * dim
    if kind in _VECTOR_NORMS:
        vectors += (heads + kv_heads) * dim
    output_gates = heads if kind in _GATED else 0
    return hidden * (2 * heads + gates + output_gates + 2 * kv_heads) * dim, vectors


def _latent_attention(text: HFConfig) -> tuple[int, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    hidden, heads, kv_rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    query, rope = text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["qk_rope_head_dim"]
    q_rank, value = text.get("q_lora_rank"), text["v_head_dim"]
    matrices = hidden * (kv_rank + rope) + kv_rank * heads * (text["qk_nope_head_dim"] + value) + heads * value * hidden
    matrices += (hidden + heads * query) * q_rank if q_rank else hidden * heads * query
    vectors = kv_rank + (q_rank or 0)
    return matrices, vectors


def _indexer(text: HFConfig, layer: int) -> tuple[int, int]:
    """Weights of the matrices, and of the norm, by which a layer chooses keys (DeepSeek-V3.2)."""
    if not _chooses(text, layer):
        return 0, 0
    heads, dim = text["index_n_heads"], text["index_head_dim"]
    return text["q_lora_rank"] * heads * dim + text["hidden_size"] * (dim + heads), 2 * dim


def _chooses(text: HFConfig, layer: int) -> bool:
    """Whether a layer has an indexer, rather than none or that of a layer before it."""
    return bool(text.get("index_head_dim")) and (text.get("indexer_types") or {layer: "full"})[layer] != "shared"


def _shared_experts(text: HFConfig, width: int) -> int:
    """Weights of the experts that every token meets, with their gate where there is one."""
    if text.get("shared_expert_intermediate_size"):
        return _gated(text, text["shared_expert_intermediate_size"]) + text["hidden_size"]
    return _gated(text, width * _num_shared(text))


def _num_shared(text: HFConfig) -> int:
    return text.get("n_shared_experts") or text.get("num_shared_experts") or 0


def _is_sparse(text: HFConfig, layer: int) -> bool:
    """Whether a layer has experts; the rules of the known families."""
    if not _num_experts(text):
        return False
    if text.get("mlp_layer_types"):
        return text["mlp_layer_types"][layer] == "sparse"
    dense = text.get("first_k_dense_replace") or text.get("num_dense_layers") or 0
    if layer < dense or layer in (text.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % text.get("decoder_sparse_step", 1) == 0


def _outside(text: HFConfig) -> int:
    """Embedding, LM head where it is its own, and the last norm."""
    matrices = 1 if text.get("tie_word_embeddings", text.get("model_type") in _TIED) else 2
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
        query=heads * query * (2 if kind in _GATED_QUERIES else 1),
        key=kv_heads * query,
        value=kv_heads * value,
        out=heads * value,
        latent=latent and latent + text["qk_rope_head_dim"] + (text.get("q_lora_rank") or 0),
        gate=heads * value if kind in _GATED else 0,
        norms=_norms(text),
        norms_heads=kind in _HEAD_NORMS or (kind == "glm4_moe" and bool(text.get("use_qk_norm"))),
        norms_vectors=kind in _VECTOR_NORMS,
        feed_forward=feed_forward,
        routed=routed,
        norms_in_single=kind in _ZERO_CENTRED,
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
        gate=0,
        norms=2,
        norms_heads=False,
        norms_vectors=False,
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
    width, routed = text.get("moe_intermediate_size") or text["intermediate_size"], _experts_per_token(text)
    return routed * width + _shared_experts(text, width) // (3 * text["hidden_size"]), routed


def _num_experts(text: HFConfig) -> int:
    return text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0


def _experts_per_token(text: HFConfig) -> int:
    return text.get("num_experts_per_tok") or text["num_experts_per_token"]


def _head_dim(text: HFConfig) -> int:
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def _head_dims(text: HFConfig) -> tuple[int, int]:
    """Dimensions of a query-key head and of a value head."""
    if text.get("kv_lora_rank"):
        return text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["v_head_dim"]
    return _head_dim(text), _head_dim(text)


def _kv_heads(text: HFConfig) -> int:
    return text.get("num_key_value_heads") or text["num_attention_heads"]
