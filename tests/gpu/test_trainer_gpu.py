"""The trainer on CUDA: half-precision attention by document, compiled and recomputed blocks, and whole runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from prime_hpc.config.run import RunConfig
from prime_hpc.models.degrees import Degrees
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.row import PackedRow
from tests.trainer_support import make_run

pytestmark = pytest.mark.gpu
SEQ_LENS = [70, 1, 33, 70, 200]
DEVICE = torch.device("cuda:0")


@pytest.fixture
def world() -> Iterator[World]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, DEVICE, Mesh.of("cuda", Degrees()), dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    """A Qwen3 of two blocks with grouped-query attention and heads of 64."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=64, initializer_range=0.1)  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def load_policy(path: Path, world: World, **trainer: object) -> PolicyModel:
    config = RunConfig()
    config.model.path = str(path)
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    policy = build_policy(config, world)
    load_weights(policy, path)
    return policy


def make_row() -> PackedRow:
    torch.manual_seed(1)
    positions = torch.cat([torch.arange(n) for n in SEQ_LENS])
    tokens, scored = torch.randint(0, 512, (len(positions),)), positions.nonzero()[:, 0]
    tensors = (tokens, positions, torch.ones(len(positions)), scored)
    return PackedRow(*(tensor.to(DEVICE) for tensor in tensors), SEQ_LENS)


def reference_logprobs(path: Path, row: PackedRow) -> torch.Tensor:
    """Every document by itself in float32; only the scored tokens."""
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE).eval()
    parts = []
    for document in row.token_ids.split(SEQ_LENS):
        with torch.no_grad():
            scores = hf(input_ids=document[None]).logits[0, :-1].log_softmax(-1)
        parts.append(scores.gather(-1, document[1:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize(("dtype", "mean", "worst"), [("float32", 1e-4, 1e-3), ("bfloat16", 0.02, 0.2)])
def test_packed_scores_equal_those_of_separate_documents(dtype, mean, worst, model_path, world):
    row = make_row()
    logprobs, _ = load_policy(model_path, world, dtype=dtype)(row)
    error = (logprobs[row.scored] - reference_logprobs(model_path, row)).abs()
    assert error.mean() < mean
    assert error.max() < worst


@pytest.mark.parametrize("options", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"},
                                     {"compile": True}, {"activation_offload": 2}])  # fmt: skip
def test_recomputed_compiled_and_offloaded_blocks_give_the_same_gradients(options, model_path, world):
    row, gradients = make_row(), []
    for changed in ({}, options):
        policy = load_policy(model_path, world, dtype="bfloat16", **changed)
        policy(row)[0].mean().backward()
        gradients.append({n: p.grad.full_tensor() for n, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() <= 0.05 * gradient.norm(), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_half_precision_run_follows_the_float32_run_on_the_cpu(ranks, tmp_path, tiny_model):
    if ranks > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    cpu = make_run(tmp_path / "cpu", tiny_model, max_steps=3).record(3).train()
    trainer = {"device": "cuda", "dtype": "bfloat16", "publish_dtype": "float32"}
    gpu = make_run(tmp_path / "gpu", tiny_model, ranks=ranks, max_steps=3, trainer=trainer)
    gpu.record(3).train_in_processes()
    for step in (1, 3):
        assert gpu.report(step).metrics["loss"] == pytest.approx(cpu.report(step).metrics["loss"], abs=0.01)
    assert gpu.report(3).metrics["perf/mfu"] > 0
    for name, tensor in gpu.weights("0.3").items():
        torch.testing.assert_close(tensor, cpu.weights("0.3")[name], rtol=0, atol=2e-3)


def test_a_resumed_run_on_a_gpu_goes_on_from_the_same_weights(tmp_path, tiny_model):
    trainer = {"device": "cuda", "dtype": "bfloat16", "publish_dtype": "float32"}
    first = make_run(tmp_path, tiny_model, max_steps=2, trainer=trainer).record(2).train()
    saved = first.weights("0.2")
    resumed = make_run(tmp_path, tiny_model, attempt=2, max_steps=3, trainer=trainer,
                       checkpoint_path=first.paths.checkpoint(2)).record(3).train()  # fmt: skip
    assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.weights("0.2").items())
    assert resumed.report(3).metrics["optim/skipped"] == 0
