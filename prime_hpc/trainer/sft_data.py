"""Rows of messages as samples: assistant replies and their end token are trained, everything else is context."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_hpc.cluster.files import read_json
from prime_hpc.config.renderer import renderer_config, template_options
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.sft_rows import Conversation, problem
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


def make_render(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> Render:
    """How rows become tokens: a renderer of the `renderers` package, or the tokenizer's chat template (`default`)."""
    if model.renderer == "default":
        return lambda row: render_template(tokenizer, row, **template_options(model))
    # here and not above: the package takes a second to load, and only rows of this kind need it
    from renderers import build_training_sample, create_renderer

    typed = create_renderer(tokenizer, renderer_config(model))

    def render(row: Conversation) -> Row:
        sample = build_training_sample(typed, row.messages, tools=row.tools, ensure_final_stop=True,
                                       role_to_mask=lambda m: m["role"] == "assistant")  # fmt: skip
        return Row(np.array(sample.token_ids, dtype=np.int32), np.array(sample.loss_mask, dtype=bool))

    return render


def render_rows(render: Render, rows: list[Conversation]) -> list[Row]:
    """All rows as tokens.

    Raises:
        ConfigurationError: the chat template or renderer takes no such messages; line and reason are in the text.
    """
    rendered = []
    for row in rows:
        try:
            rendered.append(render(row))
        except ConfigurationError:
            raise
        except Exception as error:  # a template or renderer may raise anything
            words = f"{type(error).__name__}: {error}"
            raise problem(row.place, f"messages that the chat template or model.renderer takes ({words})") from None
    return rendered


def render_template(tokenizer: PreTrainedTokenizerBase, row: Conversation, **options: Any) -> Row:
    """Render with the chat template. A reply is what the template adds to its prompt, up to its last end token.
    `options` are variables of the template.

    Raises:
        ConfigurationError: the template rewrites earlier turns, so that no row of the conversation shows them all.
    """
    token_ids = _apply(tokenizer, row, len(row.messages), **options)
    mask = np.zeros(len(token_ids), dtype=bool)
    for i, message in enumerate(row.messages):
        if message["role"] == "assistant":
            start = len(_prefix(tokenizer, row, i, token_ids, add_generation_prompt=True, **options))
            end = len(_prefix(tokenizer, row, i + 1, token_ids, **options))
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


def batch_rows(rows: int, batch_size: int, step: int, seed: int, shuffle: bool) -> list[tuple[int, int]]:
    """(epoch, row) of batch `step`, counted from 1: a pure function, so a resumed run needs no state for it."""
    positions = range((step - 1) * batch_size, step * batch_size)
    epochs = sorted({p // rows for p in positions})
    orders = {e: np.random.default_rng((seed, e)).permutation(rows) if shuffle else np.arange(rows) for e in epochs}
    return [(p // rows, int(orders[p // rows][p % rows])) for p in positions]


def _apply(tokenizer: PreTrainedTokenizerBase, row: Conversation, messages: int, **kwargs: Any) -> list[int]:
    """The rendering of the first `messages`."""
    return tokenizer.apply_chat_template(row.messages[:messages], tools=row.tools, tokenize=True, return_dict=False,
                                         **kwargs)  # fmt: skip


def _prefix(tokenizer: PreTrainedTokenizerBase, row: Conversation, messages: int, whole: list[int],
            **kwargs: Any) -> list[int]:  # fmt: skip
    """The rendering of the first `messages`, which must begin that of the whole row."""
    part = _apply(tokenizer, row, messages, **kwargs)
    if whole[: len(part)] != part:
        expected = "a renderer that keeps earlier turns: this chat template rewrites them (see the `renderers` package)"
        raise ConfigurationError([ConfigProblem("model.renderer", "default", expected)])
    return part


def _end_of_reply(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], start: int, end: int) -> int:
    """One past the end token of the reply in [start, end): what a template adds after it is not sampled."""
    ends = [i for i in range(start, end) if token_ids[i] == tokenizer.eos_token_id]
    return ends[-1] + 1 if ends else end
