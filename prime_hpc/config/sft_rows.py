"""Rows of messages for SFT, as they lie in a JSONL file."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

from prime_hpc.errors import ConfigProblem, ConfigurationError

Messages = list[dict[str, Any]]


def read_messages(path: Path, most: int | None = None) -> list[Messages]:
    """The `messages` of every line of a JSONL file, or of its first `most` lines.

    Raises:
        ConfigurationError: the file is missing or empty, or a line has no messages or messages with images; its number
            is in the text.
    """
    if not path.is_file():
        raise _problem(str(path), "a JSONL file with a `messages` list a row")
    with path.open() as lines:
        rows = [_messages(line, f"{path}:{number}") for number, line in enumerate(islice(lines, most), 1)]
    if not rows:
        raise _problem(str(path), "at least one row")
    return rows


def _messages(line: str, place: str) -> Messages:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise _problem(place, f"a JSON object a line ({error})") from error
    messages = row.get("messages") if isinstance(row, dict) else None
    if not messages or not isinstance(messages, list):
        raise _problem(place, "a row with a `messages` list that is not empty")
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise _problem(place, "messages with a `role` each")
    if any(part.get("type") != "text" for message in messages for part in _parts(message)):
        raise _problem(place, "messages of text: images train with mode=rl alone")
    return messages


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message.get("content"), list) else []


def _problem(value: str, expected: str) -> ConfigurationError:
    return ConfigurationError([ConfigProblem("trainer.sft.data", value, expected)])
