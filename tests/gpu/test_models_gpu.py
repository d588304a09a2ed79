"""Native models on CUDA: attention backends that are installed, grouped products, compiled and recomputed blocks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigurationError
from prime_hpc.models.attention import choose_backend, open_attention
from prime_hpc.models.degrees import Degrees
from prime_hpc.models.grouped import grouped_matmul, multiply_by_loop
from prime_hpc.models.grouped_fp8 import compute_padded, scaled_grouped_matmul
from prime_hpc.models.indexed import IndexedAttention, attend_to_chosen
from prime_hpc.models.moe import MixtureOfExperts, Routing
from prime_hpc.models.recurrence import choose_recurrence, open_recurrence
from prime_hpc.trainer.compilation import compile_block
from prime_hpc.trainer.distributed import World
from prime_hpc.trainer.hf_weights import load_weights
from prime_hpc.trainer.low_precision import use_fp8_in_experts
from prime_hpc.trainer.memory.checkpointing import checkpoint_block
from prime_hpc.trainer.model import build_policy
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.row import PackedRow

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
SEQ_LENS = [70, 1, 33, 70, 200]
BACKENDS = ["flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen"]
SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}  # fmt: skip
SPARSE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}

LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 64,
          "linear_num_value_heads": 4, "linear_value_head_dim": 64}  # fmt: skip


def assert_close(actual: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """The difference is at most a share of the norm."""
    assert (actual.float() - expected.float()).norm() <= share * expected.float().norm()


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", BACKENDS)
def test_backends_in_half_precision_equal_the_fallback_in_float32(name, window):
    try:
        backend = choose_backend(name, DEVICE, torch.bfloat16)
    except ConfigurationError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    n = sum(SEQ_LENS)
    heads = [torch.randn(n, count, 64, device=DEVICE, requires_grad=True) for count in (4, 2, 2)]
    upstream = torch.randn(n, 4, 64, device=DEVICE)
    expected = open_attention("sdpa", SEQ_LENS, DEVICE)(*heads, 0.125, window)
    output = open_attention(backend, SEQ_LENS, DEVICE)(*(x.bfloat16() for x in heads), 0.125, window)
    assert_close(output, expected, 0.02)
    wanted = torch.autograd.grad(expected, heads, upstream)
    for gradient, other in zip(torch.autograd.grad(output.float(), heads, upstream), wanted, strict=True):
        assert_close(gradient, other, 0.03)


@pytest.mark.parametrize("value_heads", [2, 4])
def test_delta_rules_of_fla_in_half_precision_equal_the_fallback_in_float32(value_heads):
    try:
        choose_recurrence("fla", DEVICE, torch.bfloat16)
    except ConfigurationError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    n = sum(SEQ_LENS)
    q, k, v = (torch.randn(n, heads, 64, device=DEVICE) for heads in (2, 2, value_heads))
    inputs = [q, k, v, -torch.rand(n, value_heads, device=DEVICE) / 4, torch.rand(n, value_heads, device=DEVICE)]
    x, weight = torch.randn(n, 192, device=DEVICE), torch.randn(192, 4, device=DEVICE) / 2
    leaves = [tensor.requires_grad_() for tensor in (*inputs, x, weight)]
    results = []
    for kernels, dtype in (("torch", torch.float32), ("fla", torch.bfloat16)):
        recurrence = open_recurrence(kernels, SEQ_LENS, DEVICE)
        q, k, v, beta = (leaf.to(dtype) for leaf in (*leaves[:3], leaves[4]))
        outputs = [recurrence.delta_rule(q, k, v, leaves[3], beta), recurrence.convolve(x.to(dtype), weight.to(dtype))]
        torch.manual_seed(1)
        upstream = [torch.randn(output.shape, device=DEVICE) for output in outputs]
        results.append([*outputs, *torch.autograd.grad([output.float() for output in outputs], leaves, upstream)])
    for expected, found in zip(*results, strict=True):
        assert_close(found, expected, 0.03)


def test_grouped_kernel_equals_the_loop_also_where_a_group_is_empty():
    torch.manual_seed(0)
    options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    rows, weights = torch.randn(70, 64, **options), torch.randn(4, 96, 64, **options)
    counts = torch.tensor([33, 0, 30, 7], device=DEVICE)
    output, expected = grouped_matmul(rows, weights, counts), multiply_by_loop(rows, weights, counts)
    assert_close(output, expected, 0.01)
    upstream = torch.randn_like(output)
    wanted = torch.autograd.grad(expected, [rows, weights], upstream)
    for gradient, other in zip(torch.autograd.grad(output, [rows, weights], upstream), wanted, strict=True):
        assert_close(gradient, other, 0.01)


def test_attention_over_chosen_keys_follows_float64_on_the_cpu():
    torch.manual_seed(0)
    seq_lens, n = [1500, 700], 2200
    query, keys = (torch.randn(*shape, 576, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
                   for shape in ((n, 8), (n,)))  # fmt: skip
    places = torch.arange(n, device=DEVICE)
    row = IndexedAttention(open_attention("sdpa", seq_lens, DEVICE), seq_lens, 256, places)
    chosen = row.choose(query[..., :128].detach(), keys[:, :128].detach(), torch.rand(n, 8, device=DEVICE))
    assert (chosen <= places[:, None]).all() and ((chosen[1500:] >= 1500) | (chosen[1500:] < 0)).all()
    output = row.over(query, keys, chosen, 512, 0.05)
    exact = [x.detach().cpu().double().requires_grad_() for x in (query, keys)]
    expected = attend_to_chosen(*exact, chosen.cpu(), 512, 0.05)[0]
    assert_close(output.cpu(), expected, 0.01)
    upstream = torch.randn_like(output)
    wanted = torch.autograd.grad(expected, exact, upstream.cpu().double())
    for gradient, other in zip(torch.autograd.grad(output, (query, keys), upstream), wanted, strict=True):
        assert_close(gradient.cpu(), other, 0.02)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="FP8 of experts is for Hopper"
)


@needs_hopper
@pytest.mark.parametrize("counts", [[700, 0, 1301, 33, 0, 14], [0, 0, 0, 0, 1, 0]], ids=str)
def test_fp8_grouped_kernel_follows_float64(counts):
    torch.manual_seed(0)
    options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    rows, weights = torch.randn(sum(counts), 512, **options), torch.randn(6, 768, 512, **options)
    output = compute_padded(lambda padded, sizes: scaled_grouped_matmul(padded, weights, sizes), rows,
                            torch.tensor(counts, device=DEVICE))  # fmt: skip
    groups = zip(rows.double().split(counts), weights.double(), strict=True)
    expected = torch.cat([part @ matrix.T for part, matrix in groups])
    assert_close(output, expected, 0.05)
    upstream = torch.randn_like(output)
    wanted = torch.autograd.grad(expected, [rows, weights], upstream.double())
    for gradient, other in zip(torch.autograd.grad(output, [rows, weights], upstream), wanted, strict=True):
        assert_close(gradient, other, 0.05)


@needs_hopper
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_mixture_in_fp8_follows_float64(mode, compiled):
    routing = Routing(experts=16, top_k=4, score="softmax", renormalise=True)
    mixture, exact = (MixtureOfExperts(256, 128, routing).to(DEVICE) for _ in range(2))
    torch.manual_seed(0)
    for parameter, copy in zip(mixture.parameters(), exact.parameters(), strict=True):
        parameter.data = torch.randn(parameter.shape, device=DEVICE, dtype=torch.bfloat16) * 0.1
        copy.data = parameter.data.double()
    use_fp8_in_experts(torch.nn.ModuleList([mixture]))
    checkpoint_block(mixture, mode)
    if compiled:
        compile_block(mixture, fullgraph=True)
    for tokens in (1000, 333):
        x = torch.randn(tokens, 256, device=DEVICE, dtype=torch.bfloat16)
        expected, chosen = exact(x.double(), None)
        output, _ = mixture(x, chosen)
        assert_close(output, expected, 0.08)
        upstream = torch.randn_like(output)
        wanted = torch.autograd.grad(expected, list(exact.parameters()), upstream.double())
        found = torch.autograd.grad(output, list(mixture.parameters()), upstream)
        for gradient, other in zip(found, wanted, strict=True):
            assert_close(gradient, other, 0.1)


@pytest.fixture
def world() -> Iterator[World]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, DEVICE, Mesh.of("cuda", Degrees()), dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[("qwen3", {}), ("glm4_moe", SPARSE), ("qwen3_5_text", LINEAR)],
                ids=lambda param: param[0])  # fmt: skip
def model_path(request, tmp_path_factory) -> Path:
    model_type, others = request.param
    path = tmp_path_factory.mktemp(model_type)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE, **others)).save_pretrained(path)
    return path


def run(path: Path, world: World, **trainer: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of a packed row, and gradients of their mean. Experts are replayed, since a score that is
    rounded otherwise would send a token to another expert."""
    config = RunConfig()
    config.model.path, config.model.impl = str(path), "native"
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    policy = build_policy(config, world)
    load_weights(policy, path)
    positions = torch.cat([torch.arange(n) for n in SEQ_LENS])
    n, generator = len(positions), torch.Generator().manual_seed(1)
    tokens, first = (torch.randint(0, size, (n,), generator=generator) for size in (512, 8))
    replay = torch.stack([first, (first + 3) % 8], dim=-1).expand(2, -1, -1)
    tensors = (tokens, positions, torch.ones(n), positions.nonzero()[:, 0], replay)
    *row, replay = (tensor.to(DEVICE) for tensor in tensors)
    logprobs, _ = policy(PackedRow(*row, SEQ_LENS, replay))
    logprobs.mean().backward()
    return logprobs.detach(), {name: p.grad.full_tensor() for name, p in policy.named_parameters()}


def test_half_precision_follows_float32(model_path, world):
    logprobs, gradients = run(model_path, world, dtype="bfloat16")
    expected, expected_gradients = run(model_path, world, dtype="float32")
    assert (logprobs - expected).abs().mean() < 0.03
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], 0.1)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_and_compiled_blocks_give_the_same_gradients(mode, compiled, model_path, world):
    _, expected = run(model_path, world, dtype="bfloat16")
    _, gradients = run(model_path, world, dtype="bfloat16", activation_checkpointing=mode, compile=compiled)
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], 0.1)
