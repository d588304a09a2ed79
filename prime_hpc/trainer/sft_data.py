"""Rows of messages as samples: assistant replies and their end token are trained, everything else is context."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_hpc.cluster.files import read_json
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.sft_rows import Conversation
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, Sample


@dataclass(frozen=True)
class Row:
    """A rendered row: int32[n] token ids and bool[n], true on tokens to train."""

    token_ids: np.ndarray
    mask: np.ndarray


Render = Callable[[Conversation], Row]


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with the model's end token: engines stop at that one, and some tokenizers name another."""
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer or model.path)
    for name in ("generation_config.json", "config.json"):
        ends = (read_json(Path(model.path) / name) or {}).get("eos_token_id")
        if ends is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0] if isinstance(ends, list) else ends)
            break
    return tokenizer


def make_render(tokenizer: PreTrainedTokenizerBase, renderer: str) -> Render:
    """How rows become tokens: a renderer of the `renderers` package, or the tokenizer's chat template (`default`)."""
    if renderer == "default":
        return lambda row: render_template(tokenizer, row)
    # here and not above: the package takes a second to load, and only rows of this kind need it
    from renderers import build_training_sample, create_renderer
    from renderers.configs import config_from_name

    typed = create_renderer(tokenizer, config_from_name(renderer))

    def render(row: Conversation) -> Row:
        sample = build_training_sample(typed, row.messages, role_to_mask=lambda m: m["role"] == "assistant",
                                       tools=row.tools, message_loss_mask=trained_messages(row),
                                       ensure_final_stop=True)  # fmt: skip
        return Row(np.array(sample.token_ids, dtype=np.int32), np.array(sample.loss_mask, dtype=bool))

    return render


def trained_messages(row: Conversation) -> list[bool]:
    """Which messages are trained: those of the assistant, behind a prompt."""
    return [m["role"] == "assistant" and i >= row.context for i, m in enumerate(row.messages)]


def render_template(tokenizer: PreTrainedTokenizerBase, row: Conversation) -> Row:
    """Render with the chat template. A reply is what the template adds to its prompt, up to its last end token.

    Raises:
        ConfigurationError: the template does not take the messages, or it rewrites earlier turns, so that no row of the
            conversation shows them all.
    """
    try:
        return _render_template(tokenizer, row)
    except TemplateError as error:
        expected = f"messages that the model's chat template takes, and it says: {error}"
        raise ConfigurationError([ConfigProblem("trainer.sft.data", row.place, expected)]) from error


def _render_template(tokenizer: PreTrainedTokenizerBase, row: Conversation) -> Row:
    token_ids = _apply(tokenizer, row, len(row.messages))
    mask = np.zeros(len(token_ids), dtype=bool)
    for i, trained in enumerate(trained_messages(row)):
        if trained:
            start = len(_prefix(tokenizer, row, i, token_ids, add_generation_prompt=True))
            end = len(_prefix(tokenizer, row, i + 1, token_ids))
            mask[start : _end_of_reply(tokenizer, token_ids, start, end)] = True
    return Row(np.array(token_ids, dtype=np.int32), mask)


def to_sample(row: Row, sample_id: str, max_tokens: int) -> Sample:
    """The first `max_tokens` of a row as a sample of the cross-entropy component alone."""
    token_ids, mask = row.token_ids[:max_tokens], row.mask[:max_tokens]
    zeros = Array.of(np.zeros(len(token_ids)), "f4")
    return Sample(
        sample_id=sample_id,
        source="sft",
        token_ids=Array.of(token_ids, "i4"),
        mask=Array.of(mask, "bool"),
        logprobs=zeros,
        versions=Array.of(np.full(len(token_ids), NOT_SAMPLED), "i8"),
        advantages=zeros,
        rl_weights=zeros,
        ce_weights=Array.of(mask, "f4"),
    )


def _apply(tokenizer: PreTrainedTokenizerBase, row: Conversation, count: int, **kwargs: bool) -> list[int]:
    """The tokens of the first `count` messages."""
    return tokenizer.apply_chat_template(row.messages[:count], tools=row.tools, tokenize=True, return_dict=False,
                                         **kwargs)  # fmt: skip


def _prefix(
    tokenizer: PreTrainedTokenizerBase, row: Conversation, count: int, whole: list[int], **kwargs: bool
) -> list[int]:
    """The rendering of the first messages, which must begin that of the whole row."""
    part = _apply(tokenizer, row, count, **kwargs)
    if whole[: len(part)] != part:
        expected = "a renderer that keeps earlier turns: this chat template rewrites them (see the `renderers` package)"
        raise ConfigurationError([ConfigProblem("model.renderer", "default", expected)])
    return part


def _end_of_reply(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], start: int, end: int) -> int:
    """One past the end token of the reply in [start, end): what a template adds after it is not sampled."""
    ends = [i for i in range(start, end) if token_ids[i] == tokenizer.eos_token_id]
    return ends[-1] + 1 if ends else end
