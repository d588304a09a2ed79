"""Applies parallelism to a policy from outside. Its modules know nothing of ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from prime_hpc.models.moe import Experts, MixtureOfExperts
from prime_hpc.trainer.parallel.deepep import dispatch_by_deepep
from prime_hpc.trainer.parallel.experts import dispatch_by_all_to_all, divide_experts
from prime_hpc.trainer.parallel.mesh import Mesh
from prime_hpc.trainer.parallel.tensor import divide_block


def divide_blocks(blocks: nn.ModuleList, mesh: Mesh, ep_dispatch: str) -> None:
    """Give each rank its part of what tensor and expert parallelism divide; comes before `shard`. Tokens travel to
    experts by `ep_dispatch`.

    Raises:
        ConfigurationError: that is not installed.
    """
    if mesh.tp:
        for block in blocks:
            divide_block(block, mesh.tp)
    mixtures = [module for module in blocks.modules() if isinstance(module, MixtureOfExperts)]
    if not mesh.ep or not mixtures:
        return
    for mixture in mixtures:
        divide_experts(mixture.experts, mesh.ep)
    if ep_dispatch == "deepep":
        dispatch_by_deepep(mixtures, mesh.ep.get_group())
    else:
        for mixture in mixtures:
            dispatch_by_all_to_all(mixture.experts, mesh.ep.get_group())


def shard(
    policy: nn.Module, blocks: nn.ModuleList, mesh: Mesh, dtype: torch.dtype, *, reshard_after_forward: bool = True
) -> None:
    """Shard every block, and what is outside of them, with FSDP2; computation is in `dtype`, reduction in float32.

    Without `reshard_after_forward` gathered weights of a block stay until its backward pass. A gradient becomes the sum
    over ranks, as the loss of a batch is a sum over them. That of an expert has the tokens of all ranks of its `ep`
    group already, so only the ranks of `efsdp` remain.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if mesh.expert_fsdp:
        ranks = mesh.degrees.efsdp
        for experts in _experts(blocks):
            fully_shard(experts, mesh=mesh.expert_fsdp, mp_policy=precision,
                        reshard_after_forward=reshard_after_forward,
                        shard_placement_fn=lambda parameter: _within_expert(parameter, ranks))  # fmt: skip
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    fully_shard(policy, mesh=mesh.fsdp, mp_policy=precision)
    if mesh.fsdp.size() == 1:
        return  # a division by one would still be a pass over all gradients
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _experts(module: nn.Module) -> list[Experts]:
    return [child for child in module.modules() if isinstance(child, Experts)]


def _within_expert(parameter: nn.Parameter, ranks: int) -> Shard:
    """The first dimension of an expert's matrix that the ranks divide; dimension 0 is that of the experts."""
    return Shard(next(dim for dim in (1, 2) if parameter.shape[dim] % ranks == 0))
