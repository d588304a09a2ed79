"""Adapters in the trainer: their first values, merged weights, and files in the layout of PEFT, which vLLM reads."""

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from prime_hpc.config.lora import LoRAConfig
from prime_hpc.models.conversion import SAME, Conversion
from prime_hpc.models.lora import EXPERTS, LoRA
from prime_hpc.trainer.hf_weights import local_part

PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")


def initialise(lora: LoRA, seed: int) -> None:
    """a uniform within 1 / sqrt(inputs), b zero, so that an update starts at nothing. However the parameters are
    divided among ranks, the values are the same."""
    for adapter in lora.adapters:
        for name, parameter in lora.parameters(adapter):
            local, place = local_part(parameter.detach())
            if name.endswith(".b"):
                local.zero_()
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {adapter} {name}".encode()))
            bound = 1 / math.sqrt(parameter.shape[-1])
            local.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)[place])


def whole(tensor: Tensor) -> Tensor:
    """The values of a tensor that ranks may share; all of them must ask."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def merge(lora: LoRA, name: str, weight: Tensor, adapter: str) -> Tensor:
    """`weight`, the whole values of the parameter `name`, with the update of an adapter. All ranks must ask."""
    if name not in lora.updates:
        return weight
    update = lora.updates[name].of(adapter)
    return weight.float() + lora.scale * (whole(update.b).float() @ whole(update.a).float())


def peft_tensors(lora: LoRA, conversion: Conversion, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """An adapter's whole tensors by the names that PEFT gives them. All ranks must ask."""
    for name, updates in lora.updates.items():
        for side, parameter in (("lora_A", updates.of(adapter).a), ("lora_B", updates.of(adapter).b)):
            tensor = whole(parameter)
            for piece in conversion.pieces(name, tensor.shape):
                yield f"base_model.model.{piece.name.removesuffix('weight')}{side}.weight", piece.of(tensor)


def _expert_modules(conversion: Conversion) -> set[str]:
    """The matrices of an expert by their names in the checkpoint."""
    pieces = [next(conversion.pieces(f"layer.mlp.experts.{name}", torch.Size([1]))) for name in EXPERT_MATRICES]
    return {piece.name.removesuffix(".weight").rpartition(".")[2] for piece in pieces}


def make_peft_folder(directory: Path, config: LoRAConfig, base: str, conversion: Conversion = SAME) -> Path:
    """A new folder with the configuration of an adapter of the model at `base`; returns where its weights go."""
    directory.mkdir(parents=True)
    targets = {*config.targets} - {EXPERTS} | (_expert_modules(conversion) if EXPERTS in config.targets else set())
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": config.rank,
               "lora_alpha": config.alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
               "target_modules": sorted(targets)}  # fmt: skip
    (directory / PEFT_CONFIG).write_text(json.dumps(content, indent=2))
    return directory / PEFT_WEIGHTS
