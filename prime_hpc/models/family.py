"""What makes a model family."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from prime_hpc.models.conversion import SAME, Conversion
from prime_hpc.models.decoder import CausalLM
from prime_hpc.models.layers import Block, Embedding


@dataclass(frozen=True)
class Family:
    """How to build a block and what is around them, and how parameters lie in Hugging Face checkpoints."""

    build_block: Callable[[Any, int], Block]
    """From a configuration and the index of a layer to its block."""
    conversion: Conversion = SAME
    norm: type[nn.RMSNorm] = nn.RMSNorm
    """Of the last norm."""
    build_embedding: Callable[[Any], nn.Embedding] = Embedding

    def build(self, config: PreTrainedConfig) -> CausalLM:
        """A model in float32 whose parameters hold nothing yet and have no storage."""
        with torch.device("meta"):
            return CausalLM(config, self)
