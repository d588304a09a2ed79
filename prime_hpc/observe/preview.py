"""Samples as people read them: decoded, with what trains in colour, or between marks where there are no colours."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text
from tokenizers import Tokenizer

from prime_hpc.config.sections import ModelConfig

STYLES = {
    "context": "dim",
    "pushed up": "green",
    "pushed down": "red",
    "learned": "cyan",
    "no gradient": "blue",
    "left out": "yellow",
}
"""What becomes of a token: said by others; advantage above, below 0; cross-entropy or distillation; advantage 0;
sampled, but out of the mask or in a sample that did not train."""
MARKS = {"pushed up": "+", "pushed down": "-", "learned": "~", "no gradient": "=", "left out": "?"}
"""Stand within braces around tokens in plain text; context has none."""


class Preview:
    """Decodes with a model's tokenizer. `plain` text is marked."""

    def __init__(self, tokenizer: Tokenizer, *, plain: bool = False):
        self._tokenizer, self._plain = tokenizer, plain

    @classmethod
    def of(cls, model: ModelConfig, *, plain: bool = False) -> "Preview | None":
        """None where the tokenizer has no `tokenizer.json`."""
        path = Path(model.tokenizer or model.path) / "tokenizer.json"
        return cls(Tokenizer.from_file(str(path)), plain=plain) if path.exists() else None

    def legend(self) -> Text:
        """The styles by name."""
        return Text("  ").join(self._styled(name, name) for name in STYLES)

    def render(self, record: dict[str, Any]) -> Iterator[Text]:
        """A heading and a text for each sample of a rollout record."""
        reward = record["reward"] if record["failure"] is None else record["failure"]["type"]
        for sample in record["samples"]:
            yield Text(f"{sample['sample_id']} of {record['source']}: reward {reward}", style="bold")
            yield self.text(sample)

    def text(self, sample: dict[str, Any]) -> Text:
        """The tokens of a sample, each in the style of what becomes of it."""
        made = Text()
        for fate, run in groupby(zip(fates(sample), sample["token_ids"], strict=True), key=lambda pair: pair[0]):
            ids = [token for _, token in run]
            made.append(self._styled(fate, self._tokenizer.decode(ids, skip_special_tokens=False)))
        return made

    def _styled(self, fate: str, text: str) -> Text:
        mark = MARKS.get(fate) if self._plain else None
        return Text(f"{{{mark}{text}{mark}}}" if mark else text, style=STYLES[fate])


def fates(sample: dict[str, Any]) -> list[str]:
    """A key of `STYLES` for every token of a recorded sample."""
    count = len(sample["token_ids"])
    sampled = np.zeros(count, dtype=bool)
    for _, start, end in sample["versions"]:
        sampled[start:end] = True
    mask = np.array(sample["mask"], dtype=bool)
    found = np.where(sampled | mask, "left out", "context").astype(object)
    if not sample["trained"]:
        return found.tolist()
    advantages, weights = (_stream(sample, name, fill, count) for name, fill in (("advantages", 0), ("rl_weights", 1)))
    found[mask] = "no gradient"
    found[mask & (weights != 0) & (advantages > 0)] = "pushed up"
    found[mask & (weights != 0) & (advantages < 0)] = "pushed down"
    learned = _stream(sample, "ce_weights", 0, count) + _stream(sample, "ref_kl_weights", 0, count)
    found[learned != 0] = "learned"
    return found.tolist()


def _stream(sample: dict[str, Any], name: str, fill: float, count: int) -> np.ndarray:
    return np.full(count, fill) if sample[name] is None else np.array(sample[name])
