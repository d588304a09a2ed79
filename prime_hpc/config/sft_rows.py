"""Rows of messages for SFT, as they lie in a JSONL file."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from prime_hpc.errors import ConfigProblem, ConfigurationError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """A row: its messages, the tools that its prompt offers, and its file and line."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    place: str = ""


def read_conversations(path: Path, most: int | None = None) -> list[Conversation]:
    """The rows of a JSONL file, or of its first `most` lines; empty lines are none.

    Raises:
        ConfigurationError: the file is missing or empty, or a line has no messages, messages with images or tools that
            are none; its number is in the text.
    """
    if not path.is_file():
        raise problem(str(path), "a JSONL file with a `messages` list a row")
    with path.open() as lines:
        numbered = enumerate(islice(lines, most), 1)
        rows = [_conversation(line, f"{path}:{number}") for number, line in numbered if line.strip()]
    if not rows:
        raise problem(str(path), "at least one row")
    return rows


def problem(value: str, expected: str) -> ConfigurationError:
    """A mistake in the data; `value` is the file, or file and line."""
    return ConfigurationError([ConfigProblem("trainer.sft.data", value, expected)])


def _conversation(line: str, place: str) -> Conversation:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise problem(place, f"a JSON object a line ({error})") from error
    messages = row.get("messages") if isinstance(row, dict) else None
    if not messages or not isinstance(messages, list):
        raise problem(place, "a row with a `messages` list that is not empty")
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise problem(place, "messages with a `role` each")
    if any(part.get("type") != "text" for message in messages for part in _parts(message)):
        raise problem(place, "messages of text: images train with mode=rl alone")
    return Conversation(messages, _tools(row.get("tools"), place), place)


def _tools(tools: Any, place: str) -> list[dict[str, Any]] | None:
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise problem(place, "`tools` as a list of objects, each with name, description and parameters of a function")
    return tools or None


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message.get("content"), list) else []
