"""The gated delta rule and its convolution: documents apart, chunks as token by token, sampling as training."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigurationError
from prime_hpc.models import recurrence
from prime_hpc.models.degrees import Degrees
from prime_hpc.models.recurrence import CHUNK, CachedRecurrence, TorchRecurrence, choose_recurrence
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.policy import PolicyModel
from prime_hpc.trainer.probe import sample_replies
from prime_hpc.trainer.row import PackedRow
from tests.models_support import assert_near, greedy, save_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
SEQ_LENS = [5, CHUNK, 1, 2 * CHUNK + 7, 5, CHUNK + 1]


def make_inputs(n: int) -> list[Tensor]:
    """Query, key, value, log_decay and beta."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, d, requires_grad=True) for heads, d in ((2, 16), (2, 16), (4, 12)))
    return [q, k, v, (-torch.rand(n, 4)).requires_grad_(), torch.rand(n, 4, requires_grad=True)]


def token_by_token(inputs: list[Tensor], seq_lens: list[int]) -> Tensor:
    """The rule as it is written."""
    outputs = []
    for q, k, v, log_decay, beta in zip(*(x.split(seq_lens) for x in inputs), strict=True):
        q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, dim=1) for x in (q, k))
        state = torch.zeros(4, 16, 12)
        for t in range(len(q)):
            state = state * log_decay[t, :, None, None].exp()
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) / 4)
    return torch.stack(outputs)


def test_chunks_of_documents_of_any_length_give_what_single_tokens_give():
    inputs = make_inputs(sum(SEQ_LENS))
    output, expected = TorchRecurrence(SEQ_LENS, CPU).delta_rule(*inputs), token_by_token(inputs, SEQ_LENS)
    assert_near(output, expected)
    upstream = torch.randn_like(output)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for gradient, other in zip(torch.autograd.grad(output, inputs, upstream), wanted, strict=True):
        assert_near(gradient, other)


def test_a_document_does_not_feel_its_neighbours():
    inputs, x, weight = [x.detach() for x in make_inputs(11)], torch.randn(11, 6), torch.randn(6, 4)
    changed, other = [x.clone() for x in inputs], x.clone()
    for tensor in (*changed, other):
        tensor[3:8] = 0.5
    recurrence = TorchRecurrence([3, 5, 3], CPU)
    for before, after in (
        (recurrence.delta_rule(*inputs), recurrence.delta_rule(*changed)),
        (recurrence.convolve(x, weight), recurrence.convolve(other, weight)),
    ):
        assert torch.equal(after[:3], before[:3]) and torch.equal(after[8:], before[8:])
        assert not torch.equal(after[3:8], before[3:8])


def test_sequences_that_grow_step_by_step_have_the_state_of_whole_ones():
    """Two sequences of 4 and 6 tokens, the first padded to the left; steps of 4, 1 and 1 tokens; two layers."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    whole, weight = TorchRecurrence([4, 6], CPU), torch.randn(2 * 2 * 16 + 4 * 12, 4)
    layers = [torch.randn(2, 6, len(weight)) for _ in range(2)]
    _, _, _, log_decay, beta = (x.detach().unflatten(0, (2, 6)) for x in make_inputs(12))

    def mix(recurrence: TorchRecurrence | CachedRecurrence, x: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        q, k, v = recurrence.convolve(x, weight).split([32, 32, 48], dim=-1)
        return recurrence.delta_rule(
            *(part.unflatten(-1, (n, -1)) for part, n in ((q, 2), (k, 2), (v, 4))), log_decay, beta
        )

    cache, outputs = CachedRecurrence(), [[], []]
    for start, end in ((0, 4), (4, 5), (5, 6)):
        cache.begin(mask[:, :end])
        for x, collected in zip(layers, outputs, strict=True):
            output = mix(cache, *(part[:, start:end].flatten(0, 1) for part in (x, log_decay, beta)))
            collected.append(output.unflatten(0, (2, -1)))
    for x, collected in zip(layers, outputs, strict=True):
        expected = mix(whole, *(torch.cat([part[0, 2:], part[1]]) for part in (x, log_decay, beta)))
        found = torch.cat(collected, dim=1)
        assert_near(torch.cat([found[0, 2:], found[1]]), expected)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a GPU of a compute capability with these packages and this Triton."""

    def pretend(capability: tuple[int, int], packages: tuple[str, ...], triton: str = "3.6.0") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(recurrence, "version", lambda name: triton)

    return pretend


@pytest.mark.parametrize(
    ("capability", "packages", "triton", "kernels"),
    [
        ((8, 0), ("fla",), "3.6.0", "fla"),
        ((9, 0), ("fla", "tilelang"), "3.6.0", "fla"),
        ((9, 0), ("fla",), "3.6.0", "torch"),
        ((9, 0), ("fla",), "3.7.1", "fla"),
        ((9, 0), (), "3.7.1", "torch"),
    ],
)
def test_auto_takes_fla_where_its_gradients_are_right(capability, packages, triton, kernels, machine):
    machine(capability, packages, triton)
    assert choose_recurrence("auto", GPU, torch.bfloat16) == kernels
    assert choose_recurrence("torch", GPU, torch.bfloat16) == "torch"
    assert choose_recurrence("auto", GPU, torch.float32) == choose_recurrence("auto", CPU, torch.bfloat16) == "torch"


def test_kernels_that_cannot_run_are_refused_with_the_reason(machine):
    for device, dtype, packages, reason in (
        (CPU, torch.bfloat16, ("fla",), "needs half precision on a GPU, not bfloat16 on cpu"),
        (
            GPU,
            torch.bfloat16,
            (),
            "needs flash-linear-attention, which is not installed (pip install 'prime-hpc[fla]')",
        ),
        (GPU, torch.bfloat16, ("fla",), "needs tilelang on Hopper, where Triton 3.6.0 gives wrong gradients"),
    ):
        machine((9, 0), packages)
        with pytest.raises(ConfigurationError, match="trainer.linear_attn = 'fla'") as refusal:
            choose_recurrence("fla", device, dtype)
        assert f"expected auto or torch, since fla {reason}" in str(refusal.value)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, CPU, Mesh.of("cpu", Degrees()), dist.group.WORLD)
    dist.destroy_process_group()


def load_policy(path: Path, world: World, **trainer: object) -> PolicyModel:
    config = RunConfig()
    config.model.path = str(path)
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    policy = build_policy(config, world)
    load_weights(policy, path)
    return policy


def test_recomputed_and_compiled_blocks_give_the_same_gradients(tmp_path, world, monkeypatch):
    save_model("qwen3_5_text", tmp_path)
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **others: compiler(*args, **others, backend="aot_eager"))
    positions, gradients = torch.cat([torch.arange(n) for n in (5, 1, 9)]), []
    row = PackedRow(positions * 5 % 48, positions, torch.ones(15), positions.nonzero()[:, 0], [5, 1, 9])
    for mode, compiled in (("none", False), ("full", False), ("selective", False), ("selective", True)):
        policy = load_policy(tmp_path, world, activation_checkpointing=mode, compile=compiled)
        policy(row)[0].square().sum().backward()
        gradients.append({name: p.grad.full_tensor() for name, p in policy.named_parameters()})
    assert policy.kernels == "sdpa and torch"
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert_near(other[name], gradient, name)


def test_kernels_are_chosen_where_there_is_something_to_compute_by_them(tmp_path, world):
    save_model("qwen3", tmp_path)
    assert load_policy(tmp_path, world, linear_attn="fla").kernels == "sdpa"


def test_greedy_replies_of_a_padded_batch_equal_those_of_transformers(tmp_path, world):
    hf = save_model("qwen3_5_text", tmp_path)
    prompts = [np.array([3, 9, 4]), np.array([7, 1, 30, 22, 5, 11])]
    replies = sample_replies(load_policy(tmp_path, world), prompts, 6, 0.0, end_token=48, generator=torch.Generator())
    assert replies == [greedy(hf, prompt.tolist(), 6) for prompt in prompts]
