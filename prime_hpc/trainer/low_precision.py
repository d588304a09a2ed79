"""FP8 products of matrices in the blocks: of linear layers by torchao, of experts by torch's own kernel."""

import importlib.util
from typing import NoReturn

import torch
from torch import Tensor, nn

from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.models.grouped_fp8 import MULTIPLE, compute_padded, scaled_grouped_matmul
from prime_hpc.models.moe import Experts

RATES = ("in_proj_a", "in_proj_b")
"""Projections that say by how much a state decays and moves."""


class ScaledExperts(Experts):
    """Experts whose products are in FP8. A class, lest each block be compiled for itself."""

    multiply = staticmethod(scaled_grouped_matmul)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return compute_padded(super().forward, rows, counts)


def use_fp8(blocks: nn.ModuleList, device: torch.device, *, experts: bool) -> None:
    """Turn the linear layers of `blocks` into FP8 ones, and products of their `experts`: rows of activations, weights
    and gradients have a scale each. Gradients of weights are computed in bfloat16 (as `rowwise_with_gw_hp` of torchao
    does), since scaling along the tokens costs more than the product gains. Masters stay as they are, and so do head,
    embedding, norms, routers and what a delta rule decays and moves by.

    Raises:
        ConfigurationError: torchao is not installed, or the device has no FP8 or, for experts, is no Hopper.
    """
    if importlib.util.find_spec("torchao") is None:
        _refuse("fp8", "torchao beside torch (pip install torchao)")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < (8, 9):
        _refuse("fp8", "a GPU of compute capability 8.9 or newer")
    if experts and capability != (9, 0):
        _refuse("fp8_experts", "a Hopper GPU (compute capability 9.0)")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    for block in blocks:
        convert_to_float8_training(block, config=recipe, module_filter_fn=_fits)
    if experts:
        use_fp8_in_experts(blocks)


def use_fp8_in_experts(blocks: nn.ModuleList) -> None:
    """Compute the products of the native experts in `blocks` by `scaled_grouped_matmul`."""
    for experts in (module for module in blocks.modules() if isinstance(module, Experts)):
        if not any(size % MULTIPLE for size in experts.gate_proj.shape[1:]):
            experts.__class__ = ScaledExperts


def _refuse(key: str, expected: str) -> NoReturn:
    raise ConfigurationError([ConfigProblem(f"trainer.{key}", True, f"false, or {expected}")])


def _fits(module: nn.Module, name: str) -> bool:
    whole = isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
    return whole and not name.endswith(RATES)
