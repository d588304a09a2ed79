"""What a loss reads: a micro-batch on a device, the members of each component, and their counts over the batch."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from prime_hpc.algorithms.losses.sequences import Sequences
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import MicroBatch

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name -> (sum, count), float64 scalars: pairs of micro-batches and ranks add up to the pair of the whole batch."""


@dataclass(frozen=True)
class MicroBatchTensors:
    """A micro-batch on a device: tensors [n], n = sum(seq_lens). Absent weights mean what they mean in a `Sample`."""

    token_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    logprobs: Tensor
    versions: Tensor
    advantages: Tensor
    temperatures: Tensor
    seq_lens: list[int]
    sources: list[str]
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    ref_kl_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    by_source: dict[str, Tensor] = field(default_factory=dict)
    """bool[n]: the tokens of each source, where metrics tell sources apart."""

    @classmethod
    def of(cls, micro: MicroBatch, device: torch.device | str, *, by_source: bool = False) -> "MicroBatchTensors":
        """Copy the streams of `micro` to `device`; ids, positions and versions become int64. `by_source` has metrics of
        each source as well."""

        def load(array: Array, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(array.numpy(), dtype=dtype, device=device)

        def optional(array: Array | None) -> Tensor | None:
            return None if array is None else load(array)

        return cls(
            token_ids=load(micro.token_ids, torch.int64),
            position_ids=torch.tensor(micro.position_ids(), device=device),
            mask=load(micro.mask, torch.bool),
            logprobs=load(micro.logprobs),
            versions=load(micro.versions, torch.int64),
            advantages=load(micro.advantages),
            temperatures=load(micro.temperatures),
            seq_lens=micro.seq_lens,
            sources=micro.sources,
            by_source=_by_source(micro, device) if by_source else {},
            rl_weights=optional(micro.rl_weights),
            ce_weights=optional(micro.ce_weights),
            ref_kl_weights=optional(micro.ref_kl_weights),
            ref_logprobs=optional(micro.ref_logprobs),
        )

    def pairs(self, name: str, values: Tensor, where: Tensor) -> Metrics:
        """The metric `name`, and `name/source` for each source that is told apart."""
        own = {f"{name}/{source}": pair(values, where & tokens) for source, tokens in self.by_source.items()}
        return {name: pair(values, where), **own}

    @property
    def rl_members(self) -> Tensor:
        """bool[n]: sampled tokens with a policy-gradient weight."""
        return self.mask if self.rl_weights is None else self.mask & (self.rl_weights != 0)

    @property
    def ce_members(self) -> Tensor:
        """bool[n]: tokens with a cross-entropy weight, sampled or not."""
        return _nonzero(self.ce_weights, self.mask)

    @property
    def ref_kl_members(self) -> Tensor:
        """bool[n]: tokens with a reference-KL weight, sampled or not."""
        return _nonzero(self.ref_kl_weights, self.mask)

    @cached_property
    def sequences(self) -> Sequences:
        """The packed sequences, for what is summed over each of them."""
        return Sequences.of(self.seq_lens, self.mask.device)


def _by_source(micro: MicroBatch, device: torch.device | str) -> dict[str, Tensor]:
    named = np.repeat(np.array(micro.sources, dtype=object), micro.seq_lens)
    return {source: torch.tensor(named == source, device=device) for source in sorted({*micro.sources})}


@dataclass(frozen=True)
class TokenCounts:
    """Member tokens of each component over the whole batch, all ranks together, and the sequences with a member of rl:
    the normalisers of the loss."""

    rl: int
    ce: int
    ref_kl: int
    rl_sequences: int

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """int64[4], to be summed over ranks."""
        return torch.tensor([self.rl, self.ce, self.ref_kl, self.rl_sequences], dtype=torch.int64, device=device)

    def __bool__(self) -> bool:
        """Whether any token is a member."""
        return bool(self.rl or self.ce or self.ref_kl)

    @classmethod
    def from_tensor(cls, counts: Tensor) -> "TokenCounts":
        return cls(*(int(n) for n in counts.tolist()))


def count_tokens(micro_batches: list[MicroBatch]) -> TokenCounts:
    """Member tokens and sequences of one rank's micro-batches."""

    def members(weights: Array | None) -> int:
        return 0 if weights is None else int(np.count_nonzero(weights.numpy()))

    rl = [m.mask.numpy() & (m.rl_weights is None or m.rl_weights.numpy() != 0) for m in micro_batches]
    per_sequence = [np.add.reduceat(r, np.cumsum([0, *m.seq_lens[:-1]]), dtype=np.int64)
                    for r, m in zip(rl, micro_batches, strict=True)]  # fmt: skip
    return TokenCounts(
        rl=sum(int(counts.sum()) for counts in per_sequence),
        ce=sum(members(m.ce_weights) for m in micro_batches),
        ref_kl=sum(members(m.ref_kl_weights) for m in micro_batches),
        rl_sequences=sum(int(np.count_nonzero(counts)) for counts in per_sequence),
    )


def pair(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of `values` over the tokens of `where`, and their number, as a metric."""
    return torch.where(where, values.detach().double(), 0.0).sum(), where.sum().double()


def _nonzero(weights: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool) if weights is None else weights != 0
