"""What makes a model family."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from prime_hpc.models.conversion import SAME, Conversion
from prime_hpc.models.decoder import BuildBlock, CausalLM


@dataclass(frozen=True)
class Family:
    """How to build a block, and how parameters lie in Hugging Face checkpoints."""

    build_block: BuildBlock
    conversion: Conversion = SAME

    def build(self, config: PreTrainedConfig) -> CausalLM:
        """A model in float32 whose parameters hold nothing yet and have no storage."""
        with torch.device("meta"):
            return CausalLM(config, self.build_block, self.conversion)
