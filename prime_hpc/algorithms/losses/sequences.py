"""Sums over each of the sequences that are packed into one row."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """`s` sequences one after another in a row of `tokens` = n. `lengths` is int64[s]."""

    lengths: Tensor
    tokens: int

    @classmethod
    def of(cls, seq_lens: list[int], device: torch.device) -> "Sequences":
        return cls(torch.tensor(seq_lens, device=device), sum(seq_lens))

    def sum(self, values: Tensor, where: Tensor) -> Tensor:
        """[s]: sums of `values` [n] over the tokens of `where` bool[n] in each sequence; 0 where there is none."""
        chosen = torch.where(where, values, 0.0)
        return torch.segment_reduce(chosen, "sum", lengths=self.lengths, initial=0.0, unsafe=True)

    def count(self, where: Tensor) -> Tensor:
        """[s]: tokens of `where` in each sequence, at least 1 so that one may divide by it."""
        ones = torch.ones(where.shape, dtype=torch.float32, device=where.device)
        return self.sum(ones, where).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[n]: the value of its sequence for every token."""
        return values.repeat_interleave(self.lengths, output_size=self.tokens)
