"""What layers with a state that goes from token to token compute, over packed documents that never see each other: a
short causal convolution and the gated delta rule.

A model is handed a `Recurrence` and knows nothing of documents, devices or kernels.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import conv1d, silu

from prime_hpc.errors import ConfigProblem, ConfigurationError

CHUNK = 64
"""Tokens whose updates of the state are computed at once."""
NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""
FLA, TORCH = "fla", "torch"
INSTALL = "pip install 'prime-hpc[fla]'"
BROKEN_ON_HOPPER = Version("3.4.0"), Version("3.7.1")
"""From this release of Triton to before that one, gradients of fla's own kernels are wrong on Hopper
(github.com/fla-org/flash-linear-attention/issues/640); it takes those of tilelang where that is installed."""


class Recurrence(Protocol):
    """Both begin anew, from nothing, with every document."""

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """silu of a causal convolution of each channel.

        Args:
            x: [n, channels].
            weight: [channels, taps], the last of which is for the token itself.
        """

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule (Yang et al. 2024, arXiv 2412.06464, eq. 10). The state [d_k, d_v] of a head decays, then
        moves by `beta` from what it holds under the key towards the value, and is read by the query:

            S <- exp(log_decay) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(d_k)

        Args:
            query: [n, key_heads, d_k], like the key; both are scaled to length one, and each head is shared by
                heads / key_heads heads of the value.
            value: [n, heads, d_v].
            log_decay: float32[n, heads], at most 0.
            beta: [n, heads], between 0 and 1.

        Returns:
            [n, heads, d_v].
        """


@dataclass(frozen=True)
class Chunks:
    """Documents cut into chunks, the first of each document first, then the second ones, the longest document first in
    each round; so what goes on from one round to the next is the beginning of it."""

    places: Tensor
    """int64[chunks, size]: the token at each place; n where there is none."""
    inverse: Tensor
    """int64[n]: the place of each token."""
    rounds: list[int]
    """Chunks in each."""

    @classmethod
    def of(cls, seq_lens: list[int], device: torch.device) -> "Chunks":
        """For a row of documents of these lengths."""
        n, size = sum(seq_lens), min(CHUNK, max(seq_lens))
        lengths, order = torch.tensor(seq_lens).sort(descending=True, stable=True)
        starts = (torch.tensor(seq_lens).cumsum(0) - torch.tensor(seq_lens))[order]
        rounds = [int((lengths > begin).sum()) for begin in range(0, int(lengths[0]), size)]
        document = torch.cat([torch.arange(count) for count in rounds])[:, None]
        begin = size * torch.arange(len(rounds)).repeat_interleave(torch.tensor(rounds))[:, None]
        within = begin + torch.arange(size)
        places = torch.where(within < lengths[document], starts[document] + within, n)
        return cls(places.to(device), places.flatten().argsort()[:n].to(device), rounds)

    def lay_out(self, x: Tensor) -> Tensor:
        """[n, heads, ...] to [chunks, heads, size, ...], zero where there is no token."""
        whole = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return whole.index_select(0, self.places.flatten()).unflatten(0, self.places.shape).transpose(1, 2)

    def restore(self, x: Tensor) -> Tensor:
        """The way back."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.inverse)


class TorchRecurrence:
    """The fallback for every device and dtype, in float32; documents of all lengths advance together."""

    def __init__(self, seq_lens: list[int], device: torch.device):
        self._chunks = Chunks.of(seq_lens, device)
        self._tokens = torch.arange(sum(seq_lens), device=device)
        self._document = torch.arange(len(seq_lens)).repeat_interleave(torch.tensor(seq_lens)).to(device)
        self._documents = len(seq_lens)

    @torch.compiler.disable
    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        before = weight.shape[1] - 1
        # zeros before every document
        places = self._tokens + before * (self._document + 1)
        spaced = x.new_zeros(len(x) + before * self._documents, x.shape[1]).index_copy(0, places, x)
        return silu(_convolve(spaced[None], weight)[0].index_select(0, places - before))

    @torch.compiler.disable
    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return _delta_rule(self._chunks, query, key, value, log_decay, beta)[0]


class FlaRecurrence:
    """Triton kernels of flash-linear-attention (`fla`)."""

    def __init__(self, seq_lens: list[int], device: torch.device):
        self._bounds = torch.tensor([0, *seq_lens]).cumsum(0)
        self._bounds_there = self._bounds.to(device)
        self._convolve: Any = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        self._delta_rule: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    @torch.compiler.disable
    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._convolve(x[None], weight, activation="silu", cu_seqlens=self._bounds_there,
                              cu_seqlens_cpu=self._bounds)[0][0]  # fmt: skip

    @torch.compiler.disable
    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        query, key = (_share(x, value) for x in (query, key))
        inputs = (x.contiguous()[None] for x in (query, key, value, log_decay, beta))
        return self._delta_rule(*inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=self._bounds_there,
                                cu_seqlens_cpu=self._bounds)[0][0]  # fmt: skip


class CachedRecurrence:
    """b sequences that grow step by step, for sampling; keeps the state of every layer, as `CachedAttention` does."""

    def __init__(self) -> None:
        self._length = 0
        self._inputs: dict[int, Tensor] = {}
        self._states: dict[int, Tensor] = {}

    def begin(self, mask: Tensor) -> None:
        """Start a step.

        Args:
            mask: int64[b, kept + t], 0 on padding (to the left).
        """
        self._batch, new = len(mask), mask.shape[1] - self._length
        self._chunks = Chunks.of([new] * self._batch, mask.device)
        self._real = mask[:, self._length :].flatten()[:, None]
        self._length = mask.shape[1]
        self._convolved = self._ruled = 0

    @torch.compiler.disable
    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        # what is zero here leaves no trace in the state either
        x = torch.where(self._real > 0, x, 0).unflatten(0, (self._batch, -1))
        before = self._inputs.get(self._convolved, x.new_zeros(self._batch, weight.shape[1] - 1, x.shape[-1]))
        joined = torch.cat([before, x], dim=1)
        self._inputs[self._convolved] = joined[:, x.shape[1] :]
        self._convolved += 1
        return silu(_convolve(joined, weight)).flatten(0, 1)

    @torch.compiler.disable
    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        state = self._states.get(self._ruled)
        output, self._states[self._ruled] = _delta_rule(self._chunks, query, key, value, log_decay, beta, state)
        self._ruled += 1
        return output


def choose_recurrence(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernels for `trainer.linear_attn`; `auto` takes those of fla where they run.

    Raises:
        ConfigurationError: the wanted ones cannot run here; says why.
    """
    obstacle = None if wanted == TORCH else _obstacle(device, dtype)
    if wanted == FLA and obstacle:
        raise ConfigurationError([ConfigProblem("trainer.linear_attn", FLA, f"auto or torch, since fla {obstacle}")])
    return TORCH if obstacle or wanted == TORCH else FLA


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels of fla cannot run."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"needs half precision on a GPU, not {str(dtype).removeprefix('torch.')} on {device.type}"
    if importlib.util.find_spec("fla") is None:
        return f"needs flash-linear-attention, which is not installed ({INSTALL})"
    if torch.cuda.get_device_capability(device) == (9, 0) and importlib.util.find_spec("tilelang") is None:
        triton = Version(version("triton"))
        if BROKEN_ON_HOPPER[0] <= triton < BROKEN_ON_HOPPER[1]:
            return f"needs tilelang on Hopper, where Triton {triton} gives wrong gradients ({INSTALL})"
    return None


def open_recurrence(kernels: str, seq_lens: list[int], device: torch.device) -> Recurrence:
    """What `choose_recurrence` chose, over a row of documents of these lengths."""
    return (FlaRecurrence if kernels == FLA else TorchRecurrence)(seq_lens, device)


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """[b, before + t, channels] to [b, t, channels]."""
    return conv1d(x.mT, weight[:, None], groups=len(weight)).mT


def _delta_rule(
    chunks: Chunks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `Recurrence.delta_rule`, from `state` float32[documents, heads, d_k, d_v]; gives also the last state of the
    documents of the last round."""
    q, k = (_share(_normalise(x.float()), value) for x in (query, key))
    inputs = (chunks.lay_out(x.float()) for x in (q * q.shape[-1] ** -0.5, k, value, log_decay, beta))
    output, state = _advance(chunks.rounds, state, *inputs)
    return chunks.restore(output).to(value.dtype), state


def _share(x: Tensor, value: Tensor) -> Tensor:
    """[n, heads, d_k], as many heads as those of the value."""
    return x.repeat_interleave(value.shape[1] // x.shape[1], dim=1)


def _normalise(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _advance(
    rounds: list[int], state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk (ibid., section 3.3). Within one, token t writes u_t = beta_t (v_t - S^T k_t) of the state before
    it, which is that of the chunk's beginning, S_0, and what the tokens before wrote:

        u_t + beta_t sum_{j<t} exp(c_t - c_j) (k_t k_j) u_j = beta_t (v_t - exp(c_t) S_0^T k_t),  c the summed log_decay

    a triangular system, solved at once for all chunks by its part without and its part with S_0.
    """
    summed, beta = log_decay.cumsum(-1), beta[..., None]
    causal = torch.ones(summed.shape[-1], summed.shape[-1], dtype=torch.bool, device=summed.device).tril()
    decay = (summed[..., :, None] - summed[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    begin, end, whole = (x[..., None].exp() for x in (summed, summed[..., -1:] - summed, summed[..., -1:]))
    system, wanted = beta * (k @ k.mT) * decay, torch.cat([beta * v, beta * begin * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    alone, of_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    if state is None:
        state = q.new_zeros(rounds[0], *q.shape[1:2], k.shape[-1], v.shape[-1])
    outputs = []
    for reads, scores, new, held, keys, kept in zip(
        *(x.split(rounds) for x in (begin * q, (q @ k.mT) * decay, alone, of_state, end * k, whole)), strict=True
    ):
        state = state[: len(reads)]
        written = new - held @ state
        outputs.append(reads @ state + scores @ written)
        state = kept * state + keys.mT @ written
    return torch.cat(outputs), state
