"""Native models in the trainer: sharded over ranks, beside transformers, and published in the checkpoint's names."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prime_hpc.config.run import RunConfig
from prime_hpc.models.degrees import Degrees
from prime_hpc.models.tiny import make_char_tokenizer
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.row import PackedRow
from tests.models_support import assert_near, checkpoint_gradients, save_model
from tests.trainer_support import TrainerRun, make_run

SEQ_LENS = [5, 1, 9, 5]
SHARDED = [("qwen3, yarn", "native"), ("qwen3", "hf"), ("qwen3_moe", "native"), ("glm4_moe", "native"),
           ("qwen3_5_text", "native"), ("qwen3_5_moe_text", "native")]  # fmt: skip
"""Seven experts over two ranks among them."""


def make_row(rank: int) -> PackedRow:
    positions = torch.cat([torch.arange(n) for n in SEQ_LENS])
    tokens = torch.randint(0, 48, (len(positions),), generator=torch.Generator().manual_seed(rank))
    return PackedRow(tokens, positions, torch.ones(len(positions)), positions.nonzero()[:, 0], SEQ_LENS)


def compute_gradients(rank: int, root: Path) -> None:
    """One of two ranks: gradients of the sum of all ranks' log-probabilities, in files."""
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 2), rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"), Mesh.of("cpu", Degrees(dp_shard=2)), dist.group.WORLD)
    for i, (_, impl) in enumerate(SHARDED):
        config = RunConfig()
        config.model.path, config.model.impl = str(root / str(i)), impl
        policy = build_policy(config, world)
        load_weights(policy, root / str(i))
        policy(make_row(rank))[0].sum().backward()
        gradients = {}
        for name, parameter in policy.named_parameters():
            gradients |= policy.conversion.to_hf(name, parameter.grad.full_tensor())
        if rank == 0:
            save_file({name: g.clone() for name, g in gradients.items()}, root / f"{i}.safetensors")
    dist.destroy_process_group()


def test_gradients_over_two_ranks_equal_those_of_transformers(tmp_path):
    models = [save_model(name, tmp_path / str(i)) for i, (name, _) in enumerate(SHARDED)]
    mp.spawn(compute_gradients, (tmp_path,), nprocs=2)
    for i, hf in enumerate(models):
        for rank in range(2):
            for document in make_row(rank).token_ids.split(SEQ_LENS):
                scores = hf(input_ids=document[None]).logits[0, :-1].log_softmax(-1)
                scores.gather(-1, document[1:, None]).sum().backward()
        expected, gradients = checkpoint_gradients(hf), load_file(tmp_path / f"{i}.safetensors")
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert_near(gradient, expected[name], f"{SHARDED[i]} {name}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_native_steps_are_those_of_transformers(ranks, tmp_path, tiny_model):
    runs = {}
    for impl in ("native", "hf"):
        run = make_run(tmp_path / impl, tiny_model, ranks=ranks, impl=impl, max_steps=2).record(2)
        runs[impl] = run.train() if ranks == 1 else run.train_in_forks()
    for step in (1, 2):
        native, hf = (runs[impl].report(step).metrics for impl in ("native", "hf"))
        for metric in ("loss", "entropy", "optim/grad_norm", "mismatch_kl"):
            assert native[metric] == pytest.approx(hf[metric], rel=1e-5, abs=1e-5), metric
    for name, tensor in runs["native"].weights("0.2").items():
        torch.testing.assert_close(tensor, runs["hf"].weights("0.2")[name], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory) -> Path:
    """A tiny GLM with experts, groups and a score correction, and a tokenizer."""
    path = tmp_path_factory.mktemp("glm4_moe")
    save_model("glm4_moe", path)
    make_char_tokenizer(path)
    return path


def train_sparse(root: Path, model: Path, ranks: int) -> TrainerRun:
    trainer = {"router_bias_rate": 0.125, "publish_dtype": "bfloat16"}
    run = make_run(root, model, ranks=ranks, max_steps=2, trainer=trainer, update={"keep_versions": 9}).record(2)
    return run.train() if ranks == 1 else run.train_in_forks()


def test_a_sparse_model_is_published_as_its_checkpoint_was(tmp_path, sparse_model):
    run = train_sparse(tmp_path, sparse_model, ranks=1)
    stored, published = load_file(sparse_model / "model.safetensors"), run.weights("0.0")
    assert published.keys() == stored.keys()
    corrections = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert len(corrections) == 2
    for name, tensor in published.items():
        assert torch.equal(tensor, stored[name] if name in corrections else stored[name].bfloat16()), name
    for name in corrections:
        moved = run.weights("0.1")[name] - published[name]
        torch.testing.assert_close(moved.abs(), moved.ne(0) * 0.125)
        assert moved.abs().max() > 0.1
    metrics = run.report(2).metrics
    assert 0 < metrics["moe/max_vio"] <= metrics["moe/max_vio_worst"] <= 8 / 3 - 1
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(hf.lm_head.weight, run.weights("0.2")["lm_head.weight"])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "glm4_moe"


def test_a_model_with_linear_attention_is_trained_and_published_as_its_checkpoint_was(tmp_path):
    save_model("qwen3_5_moe_text", tmp_path / "base")
    make_char_tokenizer(tmp_path / "base")
    run = make_run(tmp_path / "run", tmp_path / "base", max_steps=2, update={"keep_versions": 9}).record(2).train()
    stored, published = load_file(tmp_path / "base" / "model.safetensors"), run.weights("0.0")
    assert published.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in published.items())
    trained = run.weights("0.2")
    assert not any(torch.equal(tensor, stored[name]) for name, tensor in trained.items() if "linear_attn" in name)
    assert all(0 < run.report(step).metrics["optim/grad_norm"] < 100 for step in (1, 2))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert torch.equal(hf.model.layers[0].linear_attn.A_log, trained["model.layers.0.linear_attn.A_log"])


def test_a_resumed_sparse_run_goes_on_with_its_corrections(tmp_path, sparse_model):
    whole = train_sparse(tmp_path / "whole", sparse_model, ranks=1)
    settings = {"trainer": {"router_bias_rate": 0.125, "publish_dtype": "bfloat16"}}
    first = make_run(tmp_path / "run", sparse_model, max_steps=1, **settings).record(1).train()
    resumed = make_run(tmp_path / "run", sparse_model, attempt=2, checkpoint_path=first.paths.checkpoint(1),
                       max_steps=2, **settings).record(2).train()  # fmt: skip
    expected = whole.weights("0.2")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.weights("0.2").items())


def test_muon_over_two_ranks_is_muon_on_one_and_its_checkpoint_resumes_there(tmp_path):
    """Seven experts of a layer, and matrices with rows for both ranks."""
    save_model("qwen3_moe", tmp_path / "base")
    make_char_tokenizer(tmp_path / "base")
    settings = {"optimizer": {"name": "muon", "weight_decay": 0.1, "warmup_steps": 0}, "update": {"keep_versions": 9}}
    one = make_run(tmp_path / "one", tmp_path / "base", max_steps=2, **settings).record(2).train()
    two = make_run(tmp_path / "two", tmp_path / "base", ranks=2, max_steps=1, **settings).record(1).train_in_forks()
    start, step = one.weights("0.0"), one.weights("0.1")
    for name, tensor in two.weights("0.1").items():
        torch.testing.assert_close(tensor, step[name], rtol=0, atol=1e-6)
    moved = step["model.layers.0.mlp.experts.6.up_proj.weight"] - start["model.layers.0.mlp.experts.6.up_proj.weight"]
    assert moved.norm() == pytest.approx(1e-3 * 0.2 * 32**0.5 * 16**0.5, rel=0.4)
    resumed = make_run(tmp_path / "two", tmp_path / "base", attempt=2, checkpoint_path=two.paths.checkpoint(1),
                       max_steps=2, **settings).record(2).train()  # fmt: skip
    for name, tensor in resumed.weights("0.2").items():
        torch.testing.assert_close(tensor, one.weights("0.2")[name], rtol=0, atol=2e-6)


def test_two_ranks_train_a_sparse_model_like_one(tmp_path, sparse_model):
    one, two = (train_sparse(tmp_path / str(ranks), sparse_model, ranks) for ranks in (1, 2))
    for metric in ("loss", "optim/grad_norm", "moe/max_vio", "moe/max_vio_worst"):
        assert two.report(2).metrics[metric] == pytest.approx(one.report(2).metrics[metric], rel=1e-4), metric
    for name, tensor in two.weights("0.1").items():
        torch.testing.assert_close(tensor, one.weights("0.1")[name], rtol=2**-7, atol=1e-6)
