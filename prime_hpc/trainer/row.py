"""A packed row as the policy takes it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from prime_hpc.algorithms.losses import MicroBatchTensors
from prime_hpc.transport.messages import ImageSpan, MicroBatch


@dataclass(frozen=True)
class PackedRow:
    """A packed row of n tokens, ready for the policy.

    `scored` int64[m] are the places of the tokens whose log-probability a loss asks for, never the first of a document.
    """

    token_ids: Tensor
    position_ids: Tensor
    temperatures: Tensor
    scored: Tensor
    seq_lens: list[int]
    replay: Tensor | None = None
    """int64[layers, n, k]: experts recorded at sampling, negative where there is no record."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Tokens of each adapter, which lie together; empty where there is one policy only."""
    images: list[tuple[ImageSpan, bytes]] = field(default_factory=list)
    """The encoded images, each with the tokens that stand for it, in order."""

    @classmethod
    def of(
        cls, micro: MicroBatch, tensors: MicroBatchTensors, images: Mapping[str, bytes] = MappingProxyType({})
    ) -> "PackedRow":
        """`images` are encoded, by digest. `scored` is found on the host, so that the device need not be waited for."""
        members = micro.mask.numpy()
        for weights in (micro.ce_weights, micro.ref_kl_weights):
            members = members if weights is None else members | (weights.numpy() != 0)
        scored = torch.from_numpy((members & (micro.position_ids() > 0)).nonzero()[0])
        scored = scored.to(tensors.token_ids.device)
        adapters: dict[str, int] = defaultdict(int)
        for adapter, length in zip(micro.adapters, micro.seq_lens, strict=bool(micro.adapters)):
            adapters[adapter] += length
        replay = micro.routed_experts and torch.tensor(micro.routed_experts.numpy(), device=scored.device)
        return cls(tensors.token_ids, tensors.position_ids, tensors.temperatures, scored, micro.seq_lens,
                   None if replay is None else replay.transpose(0, 1).long(), adapters,
                   [(span, images[span.digest]) for span in micro.images])  # fmt: skip
