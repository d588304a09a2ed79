"""Names and layout of parameters in Hugging Face checkpoints, as a table for each family."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

ENTRY = "{expert}"
"""Stands for the index along dimension 0 in the name of a Hugging Face tensor."""
EXPERT_ROWS = {f"mlp.experts.{part}_proj": f"mlp.experts.{ENTRY}.{part}_proj.weight" for part in ("gate", "up", "down")}
"""Rows of a `Conversion` for experts as most checkpoints name them."""


@dataclass(frozen=True)
class Piece:
    """A Hugging Face tensor and its place in a native one: entry `index` of dimension 0, or the whole; of that `rows`,
    or all."""

    name: str
    index: int | None
    rows: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of the native tensor, as a view."""
        entry = tensor if self.index is None else tensor[self.index]
        return entry if self.rows is None else entry[self.rows]

    def shape(self, native: torch.Size) -> tuple[int, ...]:
        whole = tuple(native if self.index is None else native[1:])
        return whole if self.rows is None else (self.rows.stop - self.rows.start, *whole[1:])


@dataclass(frozen=True)
class Conversion:
    """A table from the ends of native names to those of Hugging Face names; all other names are the same.

    A row whose Hugging Face name holds `{expert}` stacks the tensors of all experts along a new dimension 0. Nothing
    is computed, so that there and back is exact.
    """

    table: dict[str, str] = field(default_factory=dict)

    def pieces(self, name: str, shape: torch.Size) -> Iterator[Piece]:
        """The Hugging Face tensors that make up the native tensor `name`, in order along dimension 0."""
        for native, hf in self.table.items():
            if name.endswith(f".{native}"):
                stem = name.removesuffix(native)
                if ENTRY not in hf:
                    yield Piece(stem + hf, None)
                for index in range(shape[0]) if ENTRY in hf else ():
                    yield Piece(stem + hf.replace(ENTRY, str(index)), index)
                return
        yield Piece(name, None)

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The whole native tensor `name` as Hugging Face tensors, which are views of it."""
        return {piece.name: piece.of(tensor) for piece in self.pieces(name, tensor.shape)}


SAME = Conversion()
"""For models whose parameters are those of the checkpoint."""
