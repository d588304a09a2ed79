"""Packed attention against a softmax written out, and the choice of its backend."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import Tensor

from prime_hpc.errors import ConfigurationError
from prime_hpc.models import attention, varlen
from prime_hpc.models.attention import BlockDiagonalAttention, CachedAttention, choose_backend, open_attention
from tests.models_support import PlainKernel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SEQ_LENS = [3, 5, 1, 3, 8]
SCALE = 0.37


def make_heads(n: int, heads: int = 4, kv_heads: int = 2, dim: int = 6) -> list[Tensor]:
    torch.manual_seed(5)
    shapes = [(n, heads, dim), (n, kv_heads, dim), (n, kv_heads, dim)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def written_out(query: Tensor, key: Tensor, value: Tensor, seq_lens: list[int], window: int | None = None) -> Tensor:
    """One softmax over the whole row, with everything but a token's own past in its own document masked, and what of it
    lies before the window."""
    document = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens))
    visible = (document[:, None] == document) & torch.ones(len(document), len(document)).tril().bool()
    visible = visible.triu(1 - (window or len(document)))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 8])
def test_packed_attention_and_its_gradients_equal_a_masked_softmax(window):
    heads = make_heads(sum(SEQ_LENS))
    output = BlockDiagonalAttention(SEQ_LENS, CPU)(*heads, SCALE, window)
    expected = written_out(*heads, SEQ_LENS, window)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(output)
    gradients = torch.autograd.grad(output, heads, upstream)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, heads, upstream), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_a_document_does_not_feel_its_neighbours():
    attend = BlockDiagonalAttention(SEQ_LENS, CPU)
    heads = [x.detach() for x in make_heads(sum(SEQ_LENS))]
    changed = [x.clone() for x in heads]
    for x in changed:
        x[3:8] = torch.randn_like(x[3:8])
    before, after = attend(*heads, SCALE), attend(*changed, SCALE)
    assert torch.equal(after[:3], before[:3])
    assert torch.equal(after[8:], before[8:])
    assert not torch.equal(after[3:8], before[3:8])


def test_sequences_that_grow_step_by_step_attend_as_whole_ones():
    """Two sequences of 4 and 6 tokens, the first padded to the left; steps of 4, 1 and 1 tokens; two layers, the second
    with a window."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    layers = [[x.detach().unflatten(0, (2, 6)) + layer for x in make_heads(12)] for layer in range(2)]
    cache, outputs = CachedAttention(), [[], []]
    for start, end in ((0, 4), (4, 5), (5, 6)):
        cache.begin(mask[:, :end])
        for heads, collected, window in zip(layers, outputs, (None, 3), strict=True):
            output = cache(*(x[:, start:end].flatten(0, 1) for x in heads), SCALE, window)
            collected.append(output.unflatten(0, (2, -1)))
    for heads, collected, window in zip(layers, outputs, (None, 3), strict=True):
        whole = torch.cat(collected, dim=1)
        assert whole.isfinite().all()
        for b, first in ((0, 2), (1, 0)):
            expected = written_out(*(x[b, first:] for x in heads), [6 - first], window)
            torch.testing.assert_close(whole[b, first:], expected, rtol=0, atol=1e-12)


HARDWARE = [
    ((9, 0), {"flash_attn_interface", "flash_attn.cute", "flash_attn.flash_attn_interface"}, "flash_attention_3"),
    ((9, 0), {"flash_attn.cute", "flash_attn.flash_attn_interface"}, "flash_attention_4"),
    ((10, 0), {"flash_attn_interface", "flash_attn.cute", "flash_attn.flash_attn_interface"}, "flash_attention_4"),
    ((12, 0), {"flash_attn.cute", "flash_attn.flash_attn_interface"}, "flash_attention_2"),
    ((8, 0), {"flash_attn.flash_attn_interface"}, "flash_attention_2"),
    ((9, 0), set(), "varlen"),
    ((7, 5), {"flash_attn.flash_attn_interface"}, "sdpa"),
]


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a GPU of a compute capability with these packages."""

    def pretend(capability: tuple[int, int], packages: set[str]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        found = packages | {name.partition(".")[0] for name in packages} | {"torch", "torch.nn", "torch.nn.attention",
                                                                            "torch.nn.attention.varlen"}  # fmt: skip
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)

    return pretend


@pytest.mark.parametrize(("capability", "packages", "backend"), HARDWARE)
def test_auto_takes_what_is_fastest_on_the_hardware(capability, packages, backend, machine):
    machine(capability, packages)
    assert choose_backend("auto", GPU, torch.bfloat16) == backend
    assert choose_backend("auto", GPU, torch.float32) == "sdpa"
    assert choose_backend("auto", CPU, torch.bfloat16) == "sdpa"


def test_a_backend_that_cannot_run_is_refused_with_the_reason(machine):
    with pytest.raises(ConfigurationError, match="needs half precision on a GPU, not float32 on cpu"):
        choose_backend("varlen", CPU, torch.float32)
    machine((8, 0), {"flash_attn.flash_attn_interface"})
    with pytest.raises(ConfigurationError, match=r"flash_attention_3 does not run on compute capability 8\.0"):
        choose_backend("flash_attention_3", GPU, torch.bfloat16)
    machine((9, 0), {"flash_attn.flash_attn_interface"})
    with pytest.raises(ConfigurationError, match=r"the module flash_attn\.cute, which is not installed"):
        choose_backend("flash_attention_4", GPU, torch.bfloat16)


@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_4_is_called_with_the_bounds_of_the_documents(window, monkeypatch):
    """A stand-in for the package that attends by the bounds and the window it is given."""
    plain = PlainKernel()

    def window_of(window_size_left=None, window_size_right=None):
        assert (window_size_left is None) == (window_size_right is None) and not window_size_right
        return None if window_size_left is None else window_size_left + 1

    def forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse,
                **sides):  # fmt: skip
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert (max_seqlen_q, max_seqlen_k, causal, return_lse) == (8, 8, True, True)
        found = plain.forward(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_of(**sides))
        return *found, None, None, None

    def backward(q, k, v, out, dout, lse, *, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                 max_seqlen_k, **sides):  # fmt: skip
        assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k)
        saved = (q, k, v, out, lse)
        return plain.backward(dout, saved, cu_seqlens_q, max_seqlen_q, softmax_scale, window_of(**sides))

    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    varlen.load.cache_clear()
    heads, gradients = make_heads(sum(SEQ_LENS)), []
    for attend in (open_attention("flash_attention_4", SEQ_LENS, CPU), BlockDiagonalAttention(SEQ_LENS, CPU)):
        inputs = [x.detach().requires_grad_() for x in heads]
        output = attend(*inputs, SCALE, window)
        output.square().sum().backward()
        gradients.append([output, *(x.grad for x in inputs)])
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("backend", "module"), [("flash_attention_2", "flash_attn.flash_attn_interface"),
                                                 ("flash_attention_3", "flash_attn_interface")])  # fmt: skip
def test_flash_attention_2_and_3_are_told_of_windows(backend, module, monkeypatch):
    """A stand-in for the packages that attends by the sides it is given."""

    def attend(q, k, v, *, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size, **_):
        left, right = window_size
        assert causal and right == (-1 if left == -1 else 0)
        window = None if left == -1 else left + 1
        return PlainKernel().forward(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window)

    interface = types.ModuleType(module)
    interface.flash_attn_varlen_func = attend
    monkeypatch.setitem(sys.modules, module, interface)
    attention._load_kernel.cache_clear()
    heads = make_heads(sum(SEQ_LENS))
    for window in (None, 1, 4):
        output = open_attention(backend, SEQ_LENS, CPU)(*heads, SCALE, window)
        torch.testing.assert_close(output, written_out(*heads, SEQ_LENS, window), rtol=0, atol=1e-12)
    attention._load_kernel.cache_clear()
