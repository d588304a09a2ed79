"""On a GPU: the kernels of the LM head against plain arithmetic, and activations and optimiser states on the host."""

import pytest
import torch
from torch import Tensor, nn

from prime_hpc.trainer import head
from prime_hpc.trainer.memory.checkpointing import checkpoint_block
from prime_hpc.trainer.memory.offload import SMALLEST, ActivationOffload
from prime_hpc.trainer.memory.states import keep_on_host

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")


def head_gradients(device: torch.device, dtype: torch.dtype, floats: torch.dtype) -> list[Tensor]:
    """Scores of bfloat16 numbers held in `dtype`, and the gradients of their weighted sum, as float64 on the CPU."""
    torch.manual_seed(0)
    states = [torch.randn(100, 64).bfloat16(), torch.randn(20_011, 64).bfloat16()]
    targets, temperatures, upstream = torch.randint(0, 20_011, (100,)), torch.rand(100) + 0.5, torch.randn(2, 100)
    inputs = [x.to(device, dtype).requires_grad_() for x in states]
    temperatures, upstream = (x.to(device, floats) for x in (temperatures, upstream))
    scores = torch.stack(head.score_tokens(*inputs, targets.to(device), temperatures, chunk=32))
    return [x.detach().double().cpu() for x in (*scores, *torch.autograd.grad((scores * upstream).sum(), inputs))]


CPU = torch.device("cpu")


def errors(found: list[Tensor]) -> list[float]:
    """Of scores and gradients, by those in float64, as a share of their norm."""
    truths = head_gradients(CPU, torch.float64, torch.float64)
    return [((one - truth).norm() / truth.norm()).item() for one, truth in zip(found, truths, strict=True)]


def test_the_head_equals_plain_arithmetic_in_float64():
    torch.backends.cuda.matmul.allow_tf32 = False
    assert max(errors(head_gradients(DEVICE, torch.float32, torch.float32))) <= 1e-5


def test_the_head_in_bfloat16_is_as_near_as_plain_arithmetic_that_rounds_logits_too():
    plain = errors(head_gradients(CPU, torch.bfloat16, torch.float32))
    kernels = errors(head_gradients(DEVICE, torch.bfloat16, torch.float32))
    assert all(error <= 1.1 * bound for error, bound in zip(kernels, plain, strict=True))


def make_blocks(count: int = 6) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256)).to(DEVICE) for _ in range(count)]


def gradients(blocks: list[nn.Sequential]) -> list[Tensor]:
    """Of two rows of 4,096 states, so that everything a block keeps is past the least size of an offload."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(4096, 256, device=DEVICE)
        assert x.nbytes > SMALLEST
        for block in blocks:
            x = x + block(x)
        x.square().sum().backward()
    return [p.grad for block in blocks for p in block.parameters()]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_offloaded_activations_give_the_same_gradients_in_less_memory(mode):
    peaks, found = [], []
    for offloaded in (False, True):
        blocks, offload = make_blocks(), ActivationOffload(DEVICE, in_flight=2)
        for block in blocks:
            checkpoint_block(block, mode)
            if offloaded:
                offload.wrap(block)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append(gradients(blocks))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert peaks[1] < peaks[0]


def test_states_on_the_host_change_no_step():
    steps = []
    for offloaded in (False, True):
        (block,) = make_blocks(1)
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.1, fused=True)
        if offloaded:
            keep_on_host(optimizer, DEVICE)
        for _ in range(3):
            gradients([block])
            optimizer.step()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert {moment.is_cuda for moment in moments} == {not offloaded}
        steps.append([p.detach().clone() for p in block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))
