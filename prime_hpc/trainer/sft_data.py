"""Rows of messages as samples: which tokens of a conversation are trained, and which are context."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_hpc.cluster.files import read_json
from prime_hpc.config.renderer import renderer_config, template_options
from prime_hpc.config.sections import ModelConfig
from prime_hpc.config.sft_rows import Conversation
from prime_hpc.config.trainer import SFTConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, Sample


@dataclass(frozen=True)
class Row:
    """A rendered row: int32[n] token ids and bool[n], true on tokens to train."""

    token_ids: np.ndarray
    mask: np.ndarray


MARK = "\ue000"
"""A text that no row has (Unicode, private use)."""
Render = Callable[[Conversation], Row]
Apply = Callable[..., Any]
"""A chat template with the tools of a row and the options of the model."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with the model's end token: engines stop at that one, and some tokenizers name another."""
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer or model.path)
    for name in ("generation_config.json", "config.json"):
        ends = (read_json(Path(model.path) / name) or {}).get("eos_token_id")
        if ends is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0] if isinstance(ends, list) else ends)
            break
    return tokenizer


def make_render(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, config: SFTConfig) -> Render:
    """How rows become tokens: a renderer of the `renderers` package, or the tokenizer's chat template (`default`).

    A row that it does not take is a ConfigurationError with its file and number, whatever template or renderer raise.
    """
    if model.renderer == "default":
        by = "model's chat template"
        render: Render = partial(render_template, tokenizer, config=config, options=template_options(model))
    else:
        by, render = f"renderer {model.renderer}", _typed_render(tokenizer, model, config)

    def checked(row: Conversation) -> Row:
        try:
            return render(row)
        except ConfigurationError:
            raise
        except Exception as error:  # a template or renderer may raise anything
            raise _refused(row, by, error) from error

    return checked


def _typed_render(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, config: SFTConfig) -> Render:
    # here and not above: the package takes a second to load, and only rows of this kind need it
    from renderers import build_training_sample, create_renderer

    typed = create_renderer(tokenizer, renderer_config(model))

    def render(row: Conversation) -> Row:
        sample = build_training_sample(typed, row.messages, role_to_mask=lambda m: m["role"] == "assistant",
                                       tools=row.tools, content_sft_roles={*config.roles} - {"assistant"},
                                       message_loss_mask=trained_messages(row, config),
                                       ensure_final_stop=True)  # fmt: skip
        return Row(np.array(sample.token_ids, dtype=np.int32), np.array(sample.loss_mask, dtype=bool))

    return render


def trained_messages(row: Conversation, config: SFTConfig) -> list[bool]:
    """Which messages are trained, by their roles; none of a prompt."""
    roles = [message["role"] for message in row.messages]
    trained = [role in config.roles and i >= row.context for i, role in enumerate(roles)]
    if config.last_reply_only:
        last = max((i for i, role in enumerate(roles) if role == "assistant"), default=0)
        trained = [flag and (role != "assistant" or i == last)
                   for i, (flag, role) in enumerate(zip(trained, roles, strict=True))]  # fmt: skip
    return trained


def render_template(
    tokenizer: PreTrainedTokenizerBase, row: Conversation, config: SFTConfig, options: dict[str, Any] | None = None
) -> Row:
    """Render with the chat template, whose variables `options` are. A reply is what the template adds to its prompt, up
    to its last end token; of other messages the text alone is trained, not what the template puts around it.

    Raises:
        ConfigurationError: the template rewrites earlier turns or a text, so that no row of the conversation shows them
            all.
    """
    apply = partial(tokenizer.apply_chat_template, tools=row.tools, return_dict=False, **(options or {}))
    token_ids = apply(row.messages)
    mask = np.zeros(len(token_ids), dtype=bool)
    for i, trained in enumerate(trained_messages(row, config)):
        if trained and row.messages[i]["role"] == "assistant":
            mask[_reply(apply, tokenizer.eos_token_id, row, i, token_ids)] = True
        elif trained:
            mask[_body(apply, tokenizer, row, i, token_ids)] = True
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


def _reply(apply: Apply, end_token: int, row: Conversation, i: int, token_ids: list[int]) -> slice:
    """The tokens of reply `i`, up to its end token: what a template adds after that is not sampled."""
    start = len(_prefix(apply, row, i, token_ids, add_generation_prompt=True))
    end = len(_prefix(apply, row, i + 1, token_ids))
    ends = [k for k in range(start, end) if token_ids[k] == end_token]
    return slice(start, ends[-1] + 1 if ends else end)


def _prefix(apply: Apply, row: Conversation, count: int, whole: list[int], **kwargs: bool) -> list[int]:
    """The rendering of the first messages, which must begin that of the whole row."""
    part = apply(row.messages[:count], **kwargs)
    if whole[: len(part)] != part:
        raise _rewritten("keeps earlier turns", row)
    return part


def _body(
    apply: Apply, tokenizer: PreTrainedTokenizerBase, row: Conversation, i: int, token_ids: list[int]
) -> np.ndarray:
    """The tokens that lie within the text of message `i`, which begins where a mark in its place does."""
    whole = apply(row.messages, tokenize=False)
    marked = [*row.messages[:i], {**row.messages[i], "content": MARK}]
    before = apply(marked, tokenize=False).partition(MARK)[0]
    text = _text(row.messages[i]["content"])
    body = next((form for form in (text, text.strip()) if whole.startswith(before + form)), None)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    if body is None or encoded["input_ids"] != token_ids:
        raise _rewritten("keeps every text as it is", row)
    starts, ends = np.array(encoded["offset_mapping"]).T
    return np.flatnonzero((starts >= len(before)) & (ends <= len(before) + len(body)) & (starts < ends))


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _refused(row: Conversation, by: str, error: Exception) -> ConfigurationError:
    expected = f"messages that the {by} takes ({type(error).__name__}: {error})"
    return ConfigurationError([ConfigProblem(row.key, row.place, expected)])


def _rewritten(what: str, row: Conversation) -> ConfigurationError:
    expected = f"a renderer that {what}: this chat template rewrites {row.place} (see the `renderers` package)"
    return ConfigurationError([ConfigProblem("model.renderer", "default", expected)])
