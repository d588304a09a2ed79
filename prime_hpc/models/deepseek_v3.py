"""DeepSeek-V3 (arXiv 2412.19437, section 2.1), and those built like it, such as Kimi K2: latent attention, and experts
that a sigmoid with a score correction chooses from the best groups, beside a shared one.

The layer for multi-token prediction that checkpoints add at the end is left out.
"""

from transformers import DeepseekV3Config

from prime_hpc.models.family import Family
from prime_hpc.models.glm4_moe import CONVERSION, build_mlp
from prime_hpc.models.latent import LatentAttention
from prime_hpc.models.layers import Block


def build_block(config: DeepseekV3Config, layer: int) -> Block:
    """The first `first_k_dense_replace` layers are dense."""
    attention = LatentAttention(config, layer, pairs=bool(config.rope_interleave))
    return Block(config.hidden_size, config.rms_norm_eps, attention, build_mlp(config, layer))


FAMILY = Family(build_block, CONVERSION)
