"""Applies parallelism to a policy from outside. Its modules know nothing of ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from prime_hpc.trainer.parallel.mesh import Mesh


def shard(
    policy: nn.Module, blocks: nn.ModuleList, mesh: Mesh, dtype: torch.dtype, *, reshard_after_forward: bool = True
) -> None:
    """Shard every block, and what is outside of them, with FSDP2; computation is in `dtype`, reduction in float32.

    Without `reshard_after_forward` the gathered weights of a block stay until its backward pass. A gradient becomes the
    sum over ranks, as the loss of a batch is a sum over them.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    fully_shard(policy, mesh=mesh.fsdp, mp_policy=precision)
    if mesh.fsdp.size() == 1:
        return  # a division by one would still be a pass over all gradients
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
