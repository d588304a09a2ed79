"""Low-rank updates of frozen matrices (Hu et al. 2021, arXiv 2106.09685, section 4.1), applied from outside.

A model is built as ever; `attach` freezes it and hangs updates on its projections. Several adapters, each with updates
of its own, may compute different tokens of one row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from prime_hpc.models.grouped import count_tokens, grouped_matmul
from prime_hpc.models.moe import MixtureOfExperts, Router

EXPERTS = "experts"
MARK = "lora"
"""The part of a parameter's name, after that of the module it updates, by which it is known as an adapter's."""


def adapter_of(name: str) -> str | None:
    """The adapter that the parameter `name` belongs to; None for a parameter of the model itself."""
    _, mark, rest = name.partition(f".{MARK}.")
    return rest.split(".")[-2] if mark else None


class LowRank(nn.Module):
    """The update b @ a, of rank r, of a matrix or a stack of matrices [..., out, in]."""

    def __init__(self, shape: torch.Size, rank: int):
        super().__init__()
        *stack, outputs, inputs = shape
        self.a = nn.Parameter(torch.empty(*stack, rank, inputs, device="meta"))
        self.b = nn.Parameter(torch.empty(*stack, outputs, rank, device="meta"))


class Updates(nn.ModuleDict):
    """The updates of one parameter, by adapter in their order."""

    def __init__(self, adapters: list[str], shape: torch.Size, rank: int):
        super().__init__({adapter: LowRank(shape, rank) for adapter in adapters})

    def of(self, adapter: str) -> LowRank:
        return cast(LowRank, self[adapter])

    def all(self) -> list[LowRank]:
        return [self.of(adapter) for adapter in self]

    def stacked(self) -> tuple[Tensor, Tensor]:
        """a [groups, r, in] and b [groups, out, r]; groups are adapters, or pairs of expert and adapter."""
        pairs = [(update.a, update.b) for update in self.all()]
        a, b = (torch.stack(parts, dim=-3).flatten(0, -3) for parts in zip(*pairs, strict=True))
        return a, b


@dataclass
class LoRA:
    """All updates of a model, and what the row at hand is made of."""

    adapters: list[str]
    scale: float
    """Of the updates: alpha / rank."""
    updates: dict[str, Updates] = field(default_factory=dict)
    """By the name of the parameter that is updated."""
    lengths: list[int] | None = None
    """Tokens of each adapter in the row, which lie together in the order of the adapters; None: all are the first's."""

    def select(self, tokens: dict[str, int]) -> None:
        """Announce a row with so many tokens of each adapter; none where all are the first's."""
        several = tokens and len(self.adapters) > 1
        self.lengths = [tokens.get(adapter, 0) for adapter in self.adapters] if several else None

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The part of each adapter, none missing: one without tokens gets a gradient too, on all ranks alike."""
        return x.split(self.lengths or [len(x)] + [0] * (len(self.adapters) - 1))

    def parameters(self, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
        """An adapter's parameters by name."""
        for name, updates in self.updates.items():
            yield f"{name}.a", updates.of(adapter).a
            yield f"{name}.b", updates.of(adapter).b


def attach(model: nn.Module, adapters: list[str], rank: int, alpha: float, targets: list[str]) -> LoRA:
    """Freeze `model` and hang updates, which hold nothing and have no storage yet, on what `targets` name."""
    model.requires_grad_(False)
    lora = LoRA(adapters, alpha / rank)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            updates = lora.updates[f"{name}.weight"] = Updates(adapters, module.weight.shape, rank)
            module.add_module(MARK, updates)
            module.register_forward_hook(partial(_add_to_linear, lora, updates))
        elif isinstance(module, MixtureOfExperts) and EXPERTS in targets:
            _attach_to_experts(lora, f"{name}.experts", module, rank)
    return lora


def _add_to_linear(lora: LoRA, updates: Updates, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    parts = zip(lora.split(inputs[0].flatten(0, -2)), updates.all(), strict=True)
    update = torch.cat([part @ low.a.T @ low.b.T for part, low in parts])
    return output + lora.scale * update.view_as(output)


def _attach_to_experts(lora: LoRA, name: str, mixture: MixtureOfExperts, rank: int) -> None:
    experts = mixture.experts
    matrices = {matrix: Updates(lora.adapters, weight.shape, rank) for matrix, weight in experts.named_parameters()}
    lora.updates |= {f"{name}.{matrix}": updates for matrix, updates in matrices.items()}
    experts.add_module(MARK, nn.ModuleDict(matrices))
    experts.update = update = _ExpertUpdate(lora, matrices)
    mixture.router.register_forward_hook(update.note)


class _ExpertUpdate:
    """What the updates of a layer's experts add to their products."""

    def __init__(self, lora: LoRA, matrices: dict[str, Updates]):
        self._lora, self._matrices = lora, matrices
        self._pairs = torch.empty(0)

    def note(self, router: Router, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        """Count the rows of each pair of expert and adapter. Rows are sorted by expert and, as tokens of one adapter
        lie together, by adapter within an expert."""
        counts = [count_tokens(part, router.routing.experts) for part in self._lora.split(output[1])]
        self._pairs = torch.stack(counts, dim=1).flatten()

    def __call__(self, matrix: str, rows: Tensor, counts: Tensor) -> Tensor:
        a, b = self._matrices[matrix].stacked()
        pairs = counts if len(self._lora.adapters) == 1 else self._pairs
        return self._lora.scale * grouped_matmul(grouped_matmul(rows, a, pairs), b, pairs)
