"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, section 3): each rank has some heads of the
attention and some channels of a dense MLP. Between them, states are whole on every rank."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from prime_hpc.models.layers import Attention, Block, SwiGLU, VectorNorm


def divide_block(block: Block, mesh: DeviceMesh) -> None:
    """Shard the attention and the dense or shared MLP of a block over a mesh of one dimension; experts stay whole."""
    for module in block.modules():
        if isinstance(module, VectorNorm):
            distribute_module(module, mesh)
        elif isinstance(module, Attention):
            parallelize_module(module, mesh, _attention_plan(module))
        elif isinstance(module, SwiGLU):
            parallelize_module(module, mesh, {"": _whole_states(1), **_columns("gate_proj", "up_proj"),
                                              "down_proj": RowwiseParallel()})  # fmt: skip


def _attention_plan(attention: Attention) -> dict[str, ParallelStyle]:
    norms = {name: _norm_style(norm) for name, norm in attention.named_children() if isinstance(norm, nn.RMSNorm)}
    columns = [name for name in ("q_proj", "k_proj", "v_proj", "gate_proj") if hasattr(attention, name)]
    return {"": _whole_states(3), **_columns(*columns), **norms, "o_proj": RowwiseParallel()}


def _norm_style(norm: nn.RMSNorm) -> ParallelStyle:
    """A rank's heads are normalised like a part of a sequence: by a whole weight, whose gradients add up. To normalise
    all heads together, each rank gathers them, and goes on with its own."""
    if not isinstance(norm, VectorNorm):
        return SequenceParallel(sequence_dim=1, use_local_output=True)
    heads, whole = (Shard(1),), (Replicate(),)
    return PrepareModuleInputOutput(input_layouts=heads, desired_input_layouts=whole, output_layouts=whole,
                                    desired_output_layouts=heads)  # fmt: skip


def _columns(*names: str) -> dict[str, ParallelStyle]:
    return {name: ColwiseParallel() for name in names}


def _whole_states(arguments: int) -> ParallelStyle:
    """The first of a module's arguments is whole on every rank; its gradients are added up once for all who read it."""
    layouts = (Replicate(), *[None] * (arguments - 1))
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
