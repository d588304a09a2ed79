"""Tiny models of every native family, beside the same models of transformers, for tests."""

from functools import reduce
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_hpc.models.attention import Attend, BlockDiagonalAttention
from prime_hpc.models.decoder import CausalLM
from prime_hpc.models.families import load_family
from prime_hpc.models.indexed import IndexedAttention
from prime_hpc.trainer.hf_weights import load_weights

SHAPE = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
         "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GLM = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
       "routed_scaling_factor": 1.7, **EXPERTS}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
          "head_dim": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, **GLM}  # fmt: skip
"""Transformers keeps 1e-6 in the latent's norms whatever `rms_norm_eps` says; engines do not."""
# as many heads as make it unlikely that none of them scores a key, since equals may be chosen in another order
DSA = {**LATENT, "index_topk": 4, "index_n_heads": 16, "index_head_dim": 8, "indexer_types": ["full", "shared", "full"]}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
         "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}}  # fmt: skip
DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
         "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 12, "initializer_range": 0.1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                             "mrope_section": [1, 1, 0], "mrope_interleaved": True}}  # fmt: skip
CONFIGS = {
    "afmoe": ("afmoe", {"num_experts": 8, "num_shared_experts": 2, "num_dense_layers": 1, "sliding_window": 4,
                        "layer_types": KINDS, "mup_enabled": True, "route_scale": 1.7, **EXPERTS}),
    "afmoe, biases": ("afmoe", {"num_experts": 8, "attention_bias": True, "sliding_window": 8, **EXPERTS}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 4, "layer_types": KINDS, "rope_parameters": ROPES,
                                    "query_pre_attn_scalar": 12}),
    "gemma3_text, biases": ("gemma3_text", {"attention_bias": True, "tie_word_embeddings": False}),
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "ministral": ("ministral", {"sliding_window": 5, "layer_types": KINDS}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "layer_types": KINDS}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3_5_text": ("qwen3_5_text", DELTA),
    "qwen3_5_text, tied": ("qwen3_5_text", {**DELTA, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 7, "mlp_only_layers": [1], "norm_topk_prob": True, **EXPERTS}),
    "qwen3_moe, plain": ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 2, **EXPERTS}),
    "qwen3_moe, windows": ("qwen3_moe", {"num_experts": 4, "use_sliding_window": True, "sliding_window": 4, **EXPERTS}),
    "glm4_moe": ("glm4_moe", GLM),
    "glm4_moe, biases": ("glm4_moe", {**GLM, "attention_bias": True, "use_qk_norm": True, "norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3, plain queries, yarn": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "glm_moe_dsa": ("glm_moe_dsa", DSA),
    "glm_moe_dsa, biases": ("glm_moe_dsa", {**DSA, "attention_bias": True, "index_topk": 64}),
}  # fmt: skip
"""By name: model type, and what its configuration has beside `SHAPE`."""
OLD_NAMES = {"minimax_m2": {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}
"""By model type: parts of names in transformers, and what checkpoints have in their place."""
FAMILY_NAMES = (
    "afmoe",
    "gemma3_text",
    "llama",
    "minimax_m2",
    "ministral",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "glm_moe_dsa",
)


def save_model(name: str, path: Path) -> PreTrainedModel:
    """Write a random model of transformers to `path`, no parameter of which is zero or one, and return it."""
    model_type, others = CONFIGS[name]
    torch.manual_seed(3)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SHAPE | others))).eval()
    for key, tensor in hf.state_dict().items():
        if key.endswith(("norm.weight", "bias", "gate.weight")):
            tensor += 0.3 * torch.randn_like(tensor)
        elif key.endswith("A_log"):
            tensor.uniform_(-4, 0)  # else nothing would be left of a state after a few tokens
    hf.save_pretrained(path)
    return hf


def open_row(seq_lens: list[int], top_k: int | None = None) -> Attend:
    """Attention over documents of these lengths on the CPU; where an indexer chooses, over `top_k` keys a query."""
    attend = BlockDiagonalAttention(seq_lens, torch.device("cpu"))
    return IndexedAttention(attend, seq_lens, top_k, torch.arange(sum(seq_lens))) if top_k else attend


def load_native(path: Path) -> CausalLM:
    """The model at `path` in its native implementation."""
    config = AutoConfig.from_pretrained(path)
    model = load_family(config.model_type).build(config).to_empty(device="cpu")
    load_weights(model, path)
    return model


def checkpoint_gradients(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Gradients by the names of a checkpoint, where transformers keeps the experts of a layer in two tensors."""
    gradients = {}
    for name, parameter in hf.named_parameters():
        if not parameter.requires_grad:
            continue
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for i, (gate, up) in enumerate(zip(*parameter.grad.chunk(2, dim=1), strict=True)):
                gradients |= {f"{stem}.{i}.gate_proj.weight": gate, f"{stem}.{i}.up_proj.weight": up}
        elif stem.endswith("experts"):
            gradients |= {f"{stem}.{i}.{leaf}.weight": down for i, down in enumerate(parameter.grad)}
        elif parameter.grad is not None:
            gradients[name] = parameter.grad
    names = OLD_NAMES.get(hf.config.model_type, {})
    return {reduce(lambda name, old: name.replace(*old), names.items(), name): g for name, g in gradients.items()}


def assert_near(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Within 1e-5 of the largest expected value."""
    scale = expected.detach().abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale, msg=lambda text: f"{what} {text}")


class PlainKernel:
    """A `VarlenKernel` for any device: all probabilities written out, and its gradient by hand."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        output = torch.einsum("hqk,khd->qhd", _probabilities(q, k, bounds, scale, window), _spread(v, q))
        return output.contiguous(), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], bounds: Tensor, longest: int, scale: float, window: int | None
    ) -> tuple[Tensor, ...]:
        q, k, v, output, _ = saved
        probs = _probabilities(q, k, bounds, scale, window)
        by_score = probs * (torch.einsum("qhd,khd->hqk", grad, _spread(v, q)) - (grad * output).sum(-1).T[..., None])
        by_query = torch.einsum("hqk,khd->qhd", by_score, _spread(k, q)) * scale
        by_key, by_value = torch.einsum("hqk,qhd->khd", by_score, q) * scale, torch.einsum("hqk,qhd->khd", probs, grad)
        by_key, by_value = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (by_key, by_value))
        return by_query.contiguous(), by_key.contiguous(), by_value.contiguous()


def _probabilities(q: Tensor, k: Tensor, bounds: Tensor, scale: float, window: int | None) -> Tensor:
    """[heads, n, n]."""
    document = torch.repeat_interleave(bounds.diff())
    visible = (document[:, None] == document) & torch.ones(len(q), len(q)).tril().bool()
    if window is not None:
        visible = visible.triu(1 - window)
    scores = torch.einsum("qhd,khd->hqk", q, _spread(k, q)) * scale
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def _spread(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def greedy(model: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    """The n most likely tokens after `prompt`, one after the other."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
