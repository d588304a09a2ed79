"""The policy against transformers' own forward and backward in float32."""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigurationError, CorruptData
from prime_hpc.models.degrees import Degrees
from prime_hpc.trainer.distributed import World, gather
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.memory.accumulation import hold_gathered
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.probe import sample_replies
from prime_hpc.trainer.row import PackedRow
from tests.models_support import save_model as save_native

SHAPE = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3_tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
}
SEQ_LENS = [5, 1, 9, 5, 12]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), Mesh.of("cpu", Degrees()), dist.group.WORLD)
    dist.destroy_process_group()


def save_model(name: str, path: Path) -> PreTrainedModel:
    torch.manual_seed(1)
    MODELS[name]().save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def load_policy(path: Path, world: World, impl: str = "auto", **trainer: object) -> PolicyModel:
    config = RunConfig()
    config.model.path, config.model.impl = str(path), impl
    config.trainer.head_chunk_tokens = 7
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    policy = build_policy(config, world)
    load_weights(policy, path)
    return policy


def make_row(seq_lens: list[int], temperature: float) -> PackedRow:
    torch.manual_seed(2)
    positions = torch.cat([torch.arange(n) for n in seq_lens])
    n = len(positions)
    tokens, scored = torch.randint(0, 48, (n,)), positions.nonzero()[:, 0]
    return PackedRow(tokens, positions, torch.full((n,), temperature), scored, seq_lens)


def reference_scores(hf: PreTrainedModel, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Every document by itself through full logits."""
    logprobs, entropies = [], []
    uniform = torch.tensor([float(hf.config.vocab_size)]).log()
    for document in row.token_ids.split(row.seq_lens):
        scores = (hf(input_ids=document[None]).logits[0, :-1] / row.temperatures[0]).log_softmax(-1)
        logprobs += [-uniform, scores.gather(-1, document[1:, None])[:, 0]]
        entropies += [uniform, -(scores.exp() * scores).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize(("impl", "attn"), [("native", "auto"), ("hf", "sdpa"), ("hf", "eager")])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_of_a_packed_row_equal_those_of_separate_documents(name, impl, attn, tmp_path, world):
    hf = save_model(name, tmp_path)
    policy, row = load_policy(tmp_path, world, impl, attn=attn), make_row(SEQ_LENS, temperature=0.7)
    expected_logprobs, expected_entropy = reference_scores(hf, row)
    logprobs, entropy = policy(row)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-5)
    upstream = torch.randn(len(logprobs))
    (logprobs * upstream).sum().backward()
    (expected_logprobs * upstream).sum().backward()
    expected = {n: p.grad for n, p in hf.named_parameters()}
    assert [n for n, _ in policy.named_parameters()] == list(expected)
    for parameter, tensor in policy.named_parameters():
        torch.testing.assert_close(tensor.grad.full_tensor(), expected[parameter], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("name", ["qwen3, windows", "mistral"])
def test_tokens_see_what_their_windows_hold(name, impl, tmp_path, world):
    """In layers of both kinds, and where no list of kinds names them."""
    hf = save_native(name, tmp_path)
    policy, row = load_policy(tmp_path, world, impl), make_row(SEQ_LENS, temperature=1.0)
    assert (policy.impl, policy.kernels) == (impl, "sdpa")
    torch.testing.assert_close(policy(row)[0], reference_scores(hf, row)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "kernels"), [("mistral", "sdpa"), ("qwen3", "varlen")])
def test_the_kernels_that_are_named_are_those_that_run(name, kernels, tmp_path, world, monkeypatch):
    """Windows are masked by transformers whatever was chosen."""
    save_native(name, tmp_path)
    monkeypatch.setattr("prime_hpc.trainer.model.choose_backend", lambda *args: "varlen")
    assert load_policy(tmp_path, world, "hf").kernels == kernels


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_recomputed_blocks_give_the_same_gradients(impl, tmp_path, world):
    save_model("qwen3", tmp_path)
    row, gradients = make_row(SEQ_LENS, temperature=1.0), []
    for value in ("none", "full"):
        policy = load_policy(tmp_path, world, impl, activation_checkpointing=value)
        policy(row)[0].square().sum().backward()
        gradients.append({n: p.grad.full_tensor() for n, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-5)


def test_only_every_nth_block_is_computed_anew(tmp_path, world):
    save_model("qwen3", tmp_path)
    policy = load_policy(tmp_path, world, activation_checkpointing="full", activation_checkpointing_every=2)
    passes = Counter()
    for i, block in enumerate(policy.blocks):
        block.mlp.register_forward_pre_hook(lambda *_, i=i: passes.update([i]))
    policy(make_row(SEQ_LENS, temperature=1.0))[0].square().sum().backward()
    assert passes == {i: 2 - i % 2 for i in range(len(policy.blocks))} and len(passes) > 1


def test_gradients_on_weights_gathered_once_are_those_of_every_micro_batch(tmp_path, world):
    save_model("qwen3", tmp_path)
    gradients = []
    for once in (False, True):
        policy = load_policy(tmp_path, world, gather_once=once)
        for last, seq_lens in ((False, SEQ_LENS), (True, [3, 4])):
            if once:
                hold_gathered(policy, last=last)
            policy(make_row(seq_lens, temperature=1.0))[0].square().sum().backward()
            assert {isinstance(p, DTensor) for p in policy.parameters()} == {last or not once}
        gradients.append([p.grad.full_tensor() for p in policy.parameters()])
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_fp8_without_torchao_says_what_to_install(tmp_path, world, monkeypatch):
    save_model("qwen3", tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "torchao" else find(name, *_))
    with pytest.raises(ConfigurationError, match=r"trainer\.fp8 = True: expected false, or torchao"):
        load_policy(tmp_path, world, attn="sdpa", fp8=True)


def test_a_row_without_scored_tokens_has_zero_gradients(tmp_path, world):
    save_model("qwen3_tied", tmp_path)
    policy = load_policy(tmp_path, world)
    row = make_row([4, 4], temperature=1.0)
    empty = PackedRow(row.token_ids, row.position_ids, row.temperatures, row.scored[:0], row.seq_lens)
    logprobs, _ = policy(empty)
    logprobs.sum().backward()
    assert logprobs.tolist() == pytest.approx([-np.log(48)] * 8)
    assert all(p.grad.full_tensor().abs().max() == 0 for p in policy.parameters())


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_greedy_replies_of_a_padded_batch_equal_those_of_transformers(impl, tmp_path, world):
    hf = save_model("qwen3", tmp_path)
    policy = load_policy(tmp_path, world, impl)
    assert policy.impl == impl
    prompts = [np.array([3, 9, 4]), np.array([7, 1, 30, 22, 5, 11])]
    replies = sample_replies(policy, prompts, 6, 0.0, end_token=47, generator=torch.Generator())
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.from_numpy(prompt)[None]
        full = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=47,
                           pad_token_id=0)  # fmt: skip
        assert reply == full[0, len(prompt) :].tolist()


def test_weights_of_another_shape_are_refused_by_name(tmp_path, world):
    save_model("qwen3", tmp_path)
    config = Qwen3Config.from_pretrained(tmp_path)
    config.intermediate_size = 128
    config.save_pretrained(tmp_path)
    with pytest.raises(CorruptData, match=r"model\.layers\.0\.mlp\.gate_proj\.weight .* \[64, 32\].*\[128, 32\]"):
        load_policy(tmp_path, world)


def test_missing_weights_are_refused_by_name(tmp_path, world):
    save_model("qwen3_tied", tmp_path)
    config = Qwen3Config.from_pretrained(tmp_path)
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path)
    with pytest.raises(CorruptData, match=r"holds no tensor lm_head\.weight"):
        load_policy(tmp_path, world)


def test_gather_keeps_what_json_would_lose(world):
    value = gather({"loss": float("nan"), "norm": float("inf"), "pairs": {"a": [1.5, 2]}})[0]
    assert np.isnan(value["loss"]) and np.isinf(value["norm"]) and value["pairs"] == {"a": [1.5, 2]}
