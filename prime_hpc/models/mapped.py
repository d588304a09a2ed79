"""Names and layout of the parameters of a model of transformers in its checkpoint, by the rules of transformers."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from prime_hpc.config.model_files import missing_weights
from prime_hpc.errors import ConfigProblem, ConfigurationError, CorruptData
from prime_hpc.models.conversion import Conversion, Piece
from prime_hpc.models.tensor_index import locate

SAME_TENSOR = ""
"""Stands for the rule of tensors that at most their name parts from a parameter."""


@dataclass(frozen=True)
class Mapped(Conversion):
    """Pieces by the name of a parameter; a parameter without any is a tensor of the same name."""

    parts: dict[str, list[Piece]] = field(default_factory=dict)

    def pieces(self, name: str, shape: torch.Size) -> Iterator[Piece]:
        yield from self.parts.get(name, [Piece(name, None)])


def map_directory(hf: PreTrainedModel, directory: Path) -> Conversion:
    """How the checkpoint in `directory` makes up the parameters of `hf`. Without weights, which a model to be exported
    may lack, the layout is that which transformers writes.

    Raises:
        ConfigurationError, CorruptData: as `map_checkpoint`.
    """
    if missing_weights(directory):
        return map_checkpoint(hf, revert_weight_conversion(hf, hf.state_dict()))
    return map_checkpoint(hf, locate(directory))


def map_checkpoint(hf: PreTrainedModel, names: Iterable[str]) -> Conversion:
    """How the tensors `names` of a checkpoint make up the parameters of `hf`, which needs no storage.

    Raises:
        ConfigurationError: transformers would compute more than stacks and concatenations.
        CorruptData: there are more or fewer experts than the configuration says.
    """
    rules = get_model_conversion_mapping(hf)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    native = hf.state_dict()
    sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, hf.base_model_prefix, native)
        if target not in native and name in native:
            target, pattern = name, None
        sources[target][pattern or SAME_TENSOR].append(name)
    return Mapped(parts={target: _pieces(target, native[target].shape, found, by_pattern)
                         for target, found in sources.items() if target in native})  # fmt: skip


def _pieces(target: str, shape: torch.Size, found: dict[str, list[str]],
            by_pattern: dict[str, WeightConverter]) -> list[Piece]:  # fmt: skip
    """The tensors that make up one parameter, `found` by the pattern of the rule that they follow."""
    if SAME_TENSOR in found:
        return [Piece(found[SAME_TENSOR][0], None)]
    rule = by_pattern[next(iter(found))]
    steps, groups = _steps(rule), [found.get(pattern, []) for pattern in rule.source_patterns]
    stacked, length = "stack" in steps, shape[0] if "stack" in steps else 1
    if not steps:
        expected = f"a checkpoint of which transformers stacks or joins tensors and does no more, unlike for {target}"
        raise ConfigurationError([ConfigProblem("model.path", rule.source_patterns[0], expected)])
    if any(len(group) != length for group in groups):
        raise CorruptData(f"{target} is made of {[len(group) for group in groups]} tensors such as "
                          f"{next(iter(found.values()))[0]}, config.json makes it {length} of each")  # fmt: skip
    rows = shape[int(stacked)] // len(groups)
    parts = [slice(i * rows, (i + 1) * rows) if "join" in steps else None for i in range(len(groups))]
    return [Piece(name, entry if stacked else None, part)
            for part, group in zip(parts, groups, strict=True) for entry, name in enumerate(group)]  # fmt: skip


def _steps(rule: WeightConverter) -> list[str]:
    """`stack` along a new first dimension, then `join` along the first one of an entry; nothing for another rule."""
    steps = [f"{type(step).__name__} {getattr(step, 'dim', None)}" for step in rule.operations]
    known = {"MergeModulelist 0": ["stack"], "MergeModulelist 0, Concatenate 1": ["stack", "join"],
             "Concatenate 0": ["join"]}  # fmt: skip
    return known.get(", ".join(steps), [])
