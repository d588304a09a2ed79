"""Rotary embeddings against those of transformers, for every way of stretching them."""

import pytest
import torch
from transformers import Gemma3TextConfig, Glm4MoeConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as apply_in_part
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from prime_hpc.models.rotary import Rotary, layer_kinds, rotate

BASE = {"rope_theta": 5e5, "original_max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 16.0, **BASE}
PARAMETERS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BASE},
    "yarn": YARN,
    "yarn, bounds": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    "yarn, factor": {**YARN, "attention_factor": 0.8},
    "yarn, two scales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, no stretch": {**YARN, "factor": 1.0},
}
POSITIONS = torch.tensor([0, 1, 2, 77, 4095, 30000])


@pytest.mark.parametrize("name", PARAMETERS)
def test_angles_equal_those_of_transformers(name):
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, max_position_embeddings=65536,
                         rope_parameters=dict(PARAMETERS[name]))  # fmt: skip
    cos, sin = Rotary.of(config)(POSITIONS, torch.float32)
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS[None])
    # a last bit of a frequency is 2e-3 radians at position 30,000
    torch.testing.assert_close(cos[:5, 0], expected_cos[0, :5], rtol=0, atol=5e-4)
    torch.testing.assert_close(sin[:5, 0], expected_sin[0, :5], rtol=0, atol=5e-4)
    torch.testing.assert_close(Rotary.of(config).frequencies, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)


def test_kinds_of_layers_have_angles_of_their_own():
    ropes = {"full_attention": PARAMETERS["linear"], "sliding_attention": PARAMETERS["default"]}
    config = Gemma3TextConfig(num_hidden_layers=2, head_dim=128, rope_parameters=ropes, sliding_window_pattern=2)
    assert layer_kinds(config) == ["sliding_attention", "full_attention"]
    theirs = Gemma3RotaryEmbedding(config)
    for kind in ropes:
        frequencies = getattr(theirs, f"{kind}_inv_freq")
        torch.testing.assert_close(Rotary.of(config, kind).frequencies, frequencies, rtol=1e-6, atol=0)


def test_a_part_of_each_head_is_turned():
    config = Glm4MoeConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    torch.manual_seed(6)
    query, key = torch.randn(6, 4, 16), torch.randn(6, 2, 16)
    rotation = Rotary.of(config)(POSITIONS, torch.float32)
    assert rotation[0].shape == (6, 1, 8)
    expected = apply_in_part(query.transpose(0, 1)[None], key.transpose(0, 1)[None],
                             *Glm4MoeRotaryEmbedding(config)(query, POSITIONS[None]))  # fmt: skip
    for ours, theirs in zip((rotate(query, rotation), rotate(key, rotation)), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=0, atol=1e-6)
    assert torch.equal(rotate(query, rotation)[..., 8:], query[..., 8:])
