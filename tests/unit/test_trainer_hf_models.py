"""Models that run in transformers: packed documents, logits, fused experts, and the check before training."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigurationError, CorruptData
from prime_hpc.models.degrees import Degrees
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights, named_weights
from prime_hpc.trainer.lora import whole
from prime_hpc.trainer.model import build_on_meta, build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.probe import sample_replies
from prime_hpc.trainer.row import PackedRow
from prime_hpc.trainer.self_check import check_scores
from tests.hf_models import MODELS, save_model
from tests.models_support import greedy

SEQ_LENS = [5, 1, 9, 5, 12]
LOG = logging.getLogger("test")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), Mesh.of("cpu", Degrees()), dist.group.WORLD)
    dist.destroy_process_group()


def make_config(path: Path, **trainer: Any) -> RunConfig:
    config = RunConfig()
    config.model.path, config.model.impl, config.trainer.head_chunk_tokens = str(path), "hf", 7
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    return config


def load_policy(path: Path, world: World, **trainer: Any) -> PolicyModel:
    policy = build_policy(make_config(path, **trainer), world)
    load_weights(policy, path)
    return policy


def make_row() -> PackedRow:
    positions = torch.cat([torch.arange(n) for n in SEQ_LENS])
    tokens = torch.randint(0, 48, (len(positions),), generator=torch.Generator().manual_seed(2))
    return PackedRow(tokens, positions, torch.full((len(positions),), 0.7), positions.nonzero()[:, 0], SEQ_LENS)


def reference_scores(hf: PreTrainedModel, row: PackedRow) -> torch.Tensor:
    """Every document by itself through full logits of eager attention."""
    logprobs = []
    for document in row.token_ids.split(row.seq_lens):
        scores = (hf(input_ids=document[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        logprobs.append(scores.gather(-1, document[1:, None])[:, 0])
    return torch.cat(logprobs)


def publish(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """All weights in names and layout of the checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named_weights(policy):
        tensors |= policy.conversion.to_hf(name, whole(tensor))
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_scores_gradients_and_published_weights_are_those_of_transformers(name, tmp_path, world):
    save_model(name, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    policy, row = load_policy(tmp_path, world), make_row()
    check_scores(policy, make_config(tmp_path), world, LOG)
    logprobs, expected = policy(row)[0][row.scored], reference_scores(hf, row)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    upstream = torch.randn(len(expected))
    (logprobs * upstream).sum().backward()
    (expected * upstream).sum().backward()
    wanted = revert_weight_conversion(hf, {n: p.grad for n, p in hf.named_parameters() if p.grad is not None})
    found: dict[str, torch.Tensor] = {}
    for parameter, tensor in policy.named_parameters():
        found |= policy.conversion.to_hf(parameter, tensor.grad.full_tensor()) if tensor.grad is not None else {}
    assert wanted.keys() <= found.keys()
    for key, gradient in found.items():
        if key in wanted:
            bound = 1e-5 * max(1.0, wanted[key].abs().max().item())
            torch.testing.assert_close(gradient, wanted[key], rtol=0, atol=bound, msg=lambda t, key=key: f"{key} {t}")
        assert key in wanted or not gradient.any()
    published, stored = publish(policy), load_file(tmp_path / "model.safetensors")
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[key], stored[key]) for key in stored)


def test_experts_that_lie_fused_on_disk_are_published_so(tmp_path, world):
    hf = save_model("renamed mixtures", tmp_path)
    save_file(hf.state_dict(), tmp_path / "model.safetensors")
    published = publish(load_policy(tmp_path, world))
    assert published.keys() == hf.state_dict().keys()
    assert all(torch.equal(published[key], tensor) for key, tensor in hf.state_dict().items())


def test_without_weights_the_layout_is_that_which_transformers_writes(tmp_path):
    save_model("renamed mixtures", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    policy = build_on_meta(make_config(tmp_path), torch.device("cpu"))
    pieces = [piece for name, p in policy.named_parameters() for piece in policy.conversion.pieces(name, p.shape)]
    assert {piece.name for piece in pieces} == stored.keys() and len(pieces) == len(stored)


def test_an_expert_too_few_is_refused_by_name(tmp_path, world):
    save_model("native elsewhere", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CorruptData, match=r"layers\.0\.mlp\.experts\.gate_up_proj is made of \[4, 3\] .* 4 of each"):
        load_policy(tmp_path, world)


@pytest.mark.parametrize("name", ["linear attention", "convolutions", "scaled logits", "soft caps"])
def test_greedy_replies_of_a_padded_batch_equal_those_of_transformers(name, tmp_path, world):
    hf, prompts = save_model(name, tmp_path), [torch.tensor([3, 9, 4]), torch.tensor([7, 1, 30, 22, 5, 11])]
    policy = load_policy(tmp_path, world)
    replies = sample_replies(policy, [p.numpy() for p in prompts], 5, 0.0, end_token=99, generator=torch.Generator())
    assert replies == [greedy(hf, prompt.tolist(), 5) for prompt in prompts]


def test_scores_that_are_not_the_models_own_are_refused(tmp_path, world):
    save_model("divided logits", tmp_path)
    policy, config = load_policy(tmp_path, world), make_config(tmp_path)
    policy.logit_scale = 1.0
    with pytest.raises(ConfigurationError, match=r"those of granite are off by 0\.\d+ nats .* attention by sdpa"):
        check_scores(policy, config, world, LOG)
    config.trainer.self_check = False
    check_scores(policy, config, world, LOG)


def test_documents_that_see_one_another_are_run_one_by_one_from_then_on(tmp_path, world, caplog):
    save_model("linear attention", tmp_path)
    policy, row = load_policy(tmp_path, world), make_row()
    expected = policy(row)[0]
    policy.one_by_one = False
    check_scores(policy, make_config(tmp_path), world, LOG)
    assert policy.one_by_one and "packed documents of qwen3_5_text see one another" in caplog.text
    assert torch.equal(policy(row)[0], expected)
