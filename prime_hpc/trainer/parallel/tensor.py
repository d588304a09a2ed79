"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, section 3): each rank has some heads of the
attention and some channels of a dense MLP. Between them, states are whole on every rank."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from prime_hpc.models.layers import Attention, Block, SwiGLU


def divide_block(block: Block, mesh: DeviceMesh) -> None:
    """Shard the attention and the dense or shared MLP of a block over a mesh of one dimension; experts stay whole."""
    for module in block.modules():
        if isinstance(module, Attention):
            parallelize_module(module, mesh, _attention_plan(module))
        elif isinstance(module, SwiGLU):
            parallelize_module(module, mesh, {"": _whole_states(1), **_columns("gate_proj", "up_proj"),
                                              "down_proj": RowwiseParallel()})  # fmt: skip


def _attention_plan(attention: Attention) -> dict[str, ParallelStyle]:
    """A rank's heads are normalised like a part of a sequence: by a whole weight, whose gradients add up."""
    norms = [name for name in ("q_norm", "k_norm") if isinstance(getattr(attention, name), nn.RMSNorm)]
    by_head = {name: SequenceParallel(sequence_dim=1, use_local_output=True) for name in norms}
    return {"": _whole_states(3), **_columns("q_proj", "k_proj", "v_proj"), **by_head, "o_proj": RowwiseParallel()}


def _columns(*names: str) -> dict[str, ParallelStyle]:
    return {name: ColwiseParallel() for name in names}


def _whole_states(arguments: int) -> ParallelStyle:
    """The first of a module's arguments is whole on every rank; its gradients are added up once for all who read it."""
    layouts = (Replicate(), *[None] * (arguments - 1))
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
