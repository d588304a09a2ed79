"""Applies parallelism to a policy from outside. Its modules know nothing of ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from prime_hpc.trainer.parallel.mesh import Mesh


def shard(policy: nn.Module, blocks: nn.ModuleList, mesh: Mesh, dtype: torch.dtype) -> None:
    """Shard every block, and what is outside of them, with FSDP2; computation is in `dtype`, reduction in float32.

    A gradient becomes the sum over ranks, as the loss of a batch is a sum over them.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*blocks, policy):
        fully_shard(module, mesh=mesh.fsdp, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
