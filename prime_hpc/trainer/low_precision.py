"""FP8 products of matrices in the blocks, by torchao."""

import importlib.util
from typing import NoReturn

import torch
from torch import nn

from prime_hpc.errors import ConfigProblem, ConfigurationError

MULTIPLE = 16
"""Sizes that FP8 kernels take."""


def use_fp8(blocks: nn.ModuleList, device: torch.device) -> None:
    """Turn the linear layers of `blocks` into FP8 ones: every row of activations, weights and gradients has a scale
    (`rowwise` of torchao), masters stay as they are. So do head, embedding, norms, routers and experts.

    Raises:
        ConfigurationError: torchao is not installed, or the device has no FP8.
    """
    if importlib.util.find_spec("torchao") is None:
        _refuse("torchao beside torch (pip install torchao)")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        _refuse("a GPU of compute capability 8.9 or newer")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name("rowwise")
    for block in blocks:
        convert_to_float8_training(block, config=recipe, module_filter_fn=_fits)


def _refuse(expected: str) -> NoReturn:
    raise ConfigurationError([ConfigProblem("trainer.fp8", True, f"false, or {expected}")])


def _fits(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
