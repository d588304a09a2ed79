"""What the vision tower of a model needs of a packed row: pixels, grids, and positions on three axes."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoImageProcessor, BaseImageProcessor, PreTrainedConfig, PreTrainedModel

from prime_hpc.errors import CorruptData
from prime_hpc.trainer.row import PackedRow
from prime_hpc.transport.images import decode


@dataclass(frozen=True)
class Pixels:
    """Images as the tower takes them.

    values float32[patches, channels * patch volume]; grids int64[images, 3], patches in time, height and width.
    """

    values: Tensor
    grids: Tensor


class ImageReader:
    """Makes patches of images by the processor that lies beside the model, as its engine does."""

    def __init__(self, directory: Path, vision: PreTrainedConfig):
        self._directory = directory
        self._merge = vision.spatial_merge_size
        self._channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    @cached_property
    def _processor(self) -> BaseImageProcessor:
        return AutoImageProcessor.from_pretrained(self._directory)

    def read(self, row: PackedRow) -> Pixels | None:
        """The images of a row in order; None where it has none.

        Raises:
            CorruptData: one cannot be decoded, or takes another number of tokens than stand for it.
        """
        if not row.images:
            return None
        read = self._processor(images=[decode(data) for _, data in row.images], return_tensors="pt")
        grids = read["image_grid_thw"]
        for (span, _), tokens in zip(row.images, (grids.prod(1) // self._merge**2).tolist(), strict=True):
            if tokens != span.length:
                raise CorruptData(f"image {span.digest} takes {tokens} tokens by the processor in {self._directory}, "
                                  f"and had {span.length} when it was sampled: sample with this processor")  # fmt: skip
        return Pixels(read["pixel_values"], grids)

    def blank(self) -> Pixels:
        """The smallest image there is, all zeros."""
        side = self._merge
        return Pixels(torch.zeros(side * side, self._channels), torch.tensor([[1, side, side]]))


def image_places(row: PackedRow) -> Tensor:
    """int64[m]: the places of the tokens that stand for images, in order."""
    return torch.cat([torch.arange(span.start, span.stop) for span, _ in row.images])


def position_ids(model: PreTrainedModel, row: PackedRow, grids: Tensor | None) -> Tensor:
    """int64[4, 1, n]: positions within the documents, which part them, and M-RoPE's in time, height and width
    (Qwen2-VL, arXiv 2409.12191, section 2.1), which begin anew with every document.

    A document's text goes on behind an image from the largest of its positions.
    """
    types = torch.zeros(len(row.token_ids), dtype=torch.int64)
    if row.images:
        types[image_places(row)] = 1
    ends = torch.tensor([0, *row.seq_lens]).cumsum(0).tolist()
    axes, seen = [], 0
    for start, end in pairwise(ends):
        count = sum(start <= span.start < end for span, _ in row.images)
        document, own = types[None, start:end], None if grids is None else grids[seen : seen + count]
        axes.append(model.get_rope_index(document, mm_token_type_ids=document, image_grid_thw=own)[0])
        seen += count
    positions = torch.cat(axes, dim=-1).to(row.position_ids.device)
    return torch.cat([row.position_ids[None, None], positions])
