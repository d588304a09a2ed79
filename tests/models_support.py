"""Tiny models of every native family, beside the same models of transformers, for tests."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_hpc.models.decoder import CausalLM
from prime_hpc.models.families import load_family
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
DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
         "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 12, "initializer_range": 0.1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                             "mrope_section": [1, 1, 0], "mrope_interleaved": True}}  # fmt: skip
CONFIGS = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3_5_text": ("qwen3_5_text", DELTA),
    "qwen3_5_text, tied": ("qwen3_5_text", {**DELTA, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 7, "mlp_only_layers": [1], "norm_topk_prob": True, **EXPERTS}),
    "qwen3_moe, plain": ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 2, **EXPERTS}),
    "glm4_moe": ("glm4_moe", GLM),
    "glm4_moe, biases": ("glm4_moe", {**GLM, "attention_bias": True, "use_qk_norm": True, "norm_topk_prob": False}),
}
"""By name: model type, and what its configuration has beside `SHAPE`."""
FAMILY_NAMES = ("llama", "qwen2", "qwen3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "glm4_moe")


def save_model(name: str, path: Path) -> PreTrainedModel:
    """Write a random model of transformers to `path`, no parameter of which is zero or one, and return it."""
    model_type, others = CONFIGS[name]
    torch.manual_seed(3)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **others})).eval()
    for key, tensor in hf.state_dict().items():
        if key.endswith(("norm.weight", "bias", "gate.weight")):
            tensor += 0.3 * torch.randn_like(tensor)
        elif key.endswith("A_log"):
            tensor.uniform_(-4, 0)  # else nothing would be left of a state after a few tokens
    hf.save_pretrained(path)
    return hf


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
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for i, (gate, up) in enumerate(zip(*parameter.grad.chunk(2, dim=1), strict=True)):
                gradients |= {f"{stem}.{i}.gate_proj.weight": gate, f"{stem}.{i}.up_proj.weight": up}
        elif stem.endswith("experts"):
            gradients |= {f"{stem}.{i}.{leaf}.weight": down for i, down in enumerate(parameter.grad)}
        else:
            gradients[name] = parameter.grad
    return gradients


def assert_near(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Within 1e-5 of the largest expected value."""
    scale = expected.detach().abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale, msg=lambda text: f"{what} {text}")


class PlainKernel:
    """A `VarlenKernel` for any device: all probabilities written out, and its gradient by hand."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        output = torch.einsum("hqk,khd->qhd", _probabilities(q, k, bounds, scale), _spread(v, q))
        return output.contiguous(), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], bounds: Tensor, longest: int, scale: float
    ) -> tuple[Tensor, ...]:
        q, k, v, output, _ = saved
        probs = _probabilities(q, k, bounds, scale)
        by_score = probs * (torch.einsum("qhd,khd->hqk", grad, _spread(v, q)) - (grad * output).sum(-1).T[..., None])
        by_query = torch.einsum("hqk,khd->qhd", by_score, _spread(k, q)) * scale
        by_key, by_value = torch.einsum("hqk,qhd->khd", by_score, q) * scale, torch.einsum("hqk,qhd->khd", probs, grad)
        by_key, by_value = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (by_key, by_value))
        return by_query.contiguous(), by_key.contiguous(), by_value.contiguous()


def _probabilities(q: Tensor, k: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """[heads, n, n]."""
    document = torch.repeat_interleave(bounds.diff())
    visible = (document[:, None] == document) & torch.ones(len(q), len(q)).tril().bool()
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
