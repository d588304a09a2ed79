"""GLM-5: the experts of GLM-4.5, and latent attention over keys that an indexer chooses (DeepSeek-V3.2, arXiv
2512.02556, section 2.1). A layer may share the choice of the one before it (arXiv 2603.12201).

The layer for multi-token prediction that checkpoints add at the end is left out.
"""

from transformers import GlmMoeDsaConfig

from prime_hpc.models.family import Family
from prime_hpc.models.glm4_moe import CONVERSION, build_mlp
from prime_hpc.models.latent import LatentAttention
from prime_hpc.models.layers import Block


def build_block(config: GlmMoeDsaConfig, layer: int) -> Block:
    """`indexer_types` names the layers that choose for themselves; the first `first_k_dense_replace` are dense."""
    types = config.indexer_types or []
    chooser = max(i for i in range(layer + 1) if types[i] == "full")
    attention = LatentAttention(config, layer, indexer=chooser, shared="shared" in types[layer + 1 : layer + 2])
    return Block(config.hidden_size, config.rms_norm_eps, attention, build_mlp(config, layer))


FAMILY = Family(build_block, CONVERSION)
