"""What the trainer uses of DeepEP, which needs GPUs under NVLink: the same interface and layout, by collectives of any
process group. It is found as `deep_ep` where this folder is on the path."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Handle = tuple[int, Tensor, list[int], list[int]]
"""How many tokens there are, those that were sent, rank by rank, how many to each rank, and how many from each."""


@dataclass(frozen=True)
class Config:
    num_max_nvl_chunked_recv_tokens: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else num_ranks * hidden_bytes


class Buffer:
    def __init__(self, group: ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config({2: 256, 4: 256}[num_ranks])

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config({2: 128, 4: 128}[num_ranks])

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        ranks = torch.arange(self.group.size())
        reaches = (topk_idx[..., None] // (num_experts // self.group.size()) == ranks).any(1)
        by_expert = topk_idx.flatten().bincount(minlength=num_experts)
        return reaches.sum(0).int(), None, by_expert.int(), reaches, None

    def dispatch(self, x: Tensor, handle: Handle | None = None, num_tokens_per_rank: Tensor | None = None,
                 num_tokens_per_rdma_rank: Tensor | None = None, is_token_in_rank: Tensor | None = None,
                 num_tokens_per_expert: Tensor | None = None, topk_idx: Tensor | None = None,
                 topk_weights: Tensor | None = None) -> tuple[Any, ...]:  # fmt: skip
        assert x.is_contiguous()
        if handle is not None:
            _, tokens, sent, received = handle
            return self._send(x[tokens], sent, received), None, None, None, None, None
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        ranks, tokens = is_token_in_rank.T.nonzero(as_tuple=True)
        sent, received = num_tokens_per_rank.tolist(), torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank, group=self.group)
        handle = (len(x), tokens, sent, received.tolist())
        here = len(num_tokens_per_expert) // self.group.size()
        local = topk_idx[tokens] - here * ranks[:, None]
        local = local.where((local >= 0) & (local < here), -1)
        weights = topk_weights[tokens] * (local >= 0)
        x, local, weights = (self._send(part, *handle[2:]) for part in (x[tokens], local, weights))
        return x, local, weights, local[local >= 0].bincount(minlength=here).tolist(), handle, None

    def combine(self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        assert x.is_contiguous() and len(x) == sum(handle[-1])
        return self._sum(x, handle), None if topk_weights is None else self._sum(topk_weights, handle), None

    def _sum(self, x: Tensor, handle: Handle) -> Tensor:
        total, tokens, sent, received = handle
        back = self._send(x, received, sent)
        return x.new_zeros(total, x.shape[1]).index_add(0, tokens, back)

    def _send(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        output = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(output, x.contiguous(), received, sent, group=self.group)
        return output
