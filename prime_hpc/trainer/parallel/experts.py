"""Expert parallelism (GShard, Lepikhin et al. 2020, arXiv 2006.16668): every rank holds some of the experts, and tokens
travel to the ranks of theirs and back."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from prime_hpc.models.grouped import invert
from prime_hpc.models.moe import Experts
from prime_hpc.trainer.parallel.collectives import all_to_all

Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows sorted by expert, and rows of each expert, to rows."""


def divide_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Leave each rank of a mesh of one dimension its share of the stacked matrices."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        share = distribute_tensor(parameter, mesh, [Shard(0)])
        experts.register_parameter(name, nn.Parameter(share, requires_grad=parameter.requires_grad))


def dispatch_by_all_to_all(experts: Experts, group: ProcessGroup) -> None:
    """Let the rows of `experts`, which are divided among `group`, travel to them and back."""
    experts.forward = torch.compiler.disable(partial(_forward, experts.forward, group))


def _forward(compute: Compute, group: ProcessGroup, rows: Tensor, counts: Tensor) -> Tensor:
    """`Experts.forward` for `counts` int64[experts] of all ranks' experts."""
    journey = Journey.of(counts, group)
    return journey.back(compute(journey.there(rows), journey.counts))


@dataclass(frozen=True)
class Journey:
    """How this rank's rows, sorted by expert, reach the ranks of the experts, and theirs this one."""

    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    order: Tensor
    """int64[sum(received)]: sorts the rows by expert, which arrive by sender and then by expert."""
    inverse: Tensor
    counts: Tensor
    """int64[experts of this rank]: rows of each."""
    group: ProcessGroup

    @classmethod
    def of(cls, counts: Tensor, group: ProcessGroup) -> "Journey":
        """From the rows of each of all experts; the ranks tell each other, and wait for the device once."""
        mine = counts.unflatten(0, (group.size(), -1))
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
        expert = torch.arange(theirs.shape[1], device=counts.device).repeat(group.size())
        order = expert.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
        return cls(sent, received, order, invert(order), theirs.sum(0), group)

    def there(self, rows: Tensor) -> Tensor:
        """[sum(sent), h] of all experts to [sum(received), h] of this rank's, sorted by expert."""
        arrived = all_to_all(rows, self.received, self.sent, self.group)
        return _Permute.apply(arrived, self.order, self.inverse)

    def back(self, rows: Tensor) -> Tensor:
        """The way back."""
        return all_to_all(_Permute.apply(rows, self.inverse, self.order), self.sent, self.received, self.group)


class _Permute(torch.autograd.Function):
    """x[order]. Its backward pass gathers, where that of an index would add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
