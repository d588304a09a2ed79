"""What makes a model family."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from prime_hpc.models.conversion import SAME, Conversion
from prime_hpc.models.decoder import BuildBlock, CausalLM


@dataclass(frozen=True)
class Family:
    """How to build a block, how parameters lie in Hugging Face checkpoints, and the kind of the last norm."""

    build_block: BuildBlock
    conversion: Conversion = SAME
    norm: type[nn.RMSNorm] = nn.RMSNorm

    def build(self, config: PreTrainedConfig) -> CausalLM:
        """A model in float32 whose parameters hold nothing yet and have no storage."""
        with torch.device("meta"):
            return CausalLM(config, self.build_block, self.conversion, self.norm)
