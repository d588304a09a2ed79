"""Rows of SFT data: conversations as they lie in JSONL and parquet files, one at a time and by number."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from prime_hpc.errors import ConfigProblem, ConfigurationError

Messages = list[dict[str, Any]]
DATA, VALIDATION_DATA = "trainer.sft.data", "trainer.sft.validation.data"
PARQUET = ".parquet"
COLUMNS = ("messages", "prompt", "completion", "tools")
FORMS = "a row with a `messages` list, or with `prompt` and `completion`"
SCAN_BYTES = 2**24
"""Read at once to find where lines begin."""
BLANK_BYTES = 16
"""A line up to this long may be blank, which is no row; longer ones are rows."""


@dataclass(frozen=True)
class Conversation:
    """A row: its messages, the tools that its model has, and where it lies (`file:row`, or line, counted from 1)."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    context: int = 0
    """So many messages at the beginning are a prompt and never trained."""
    place: str = ""
    key: str = DATA
    """That of the configuration which names its file."""


class RowFile(Protocol):
    """Rows by number, each read when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Conversation: ...


def open_rows(path: Path, key: str, ends: np.ndarray | None = None) -> RowFile:
    """The rows of a file, parquet by its suffix and JSONL otherwise; `key` is blamed for what is wrong with it.

    `ends` are the ends of its lines where somebody has looked for them already.

    Raises:
        ConfigurationError: the file is missing, empty or unreadable; or pyarrow is missing, which parquet needs.
    """
    _check_present(path, key)
    rows: RowFile = ParquetRows(path, key) if path.suffix == PARQUET else JsonlRows(path, key, ends)
    if not len(rows):
        raise _problem(key, str(path), "at least one row")
    return rows


def read_first(path: Path, key: str, most: int) -> list[Conversation]:
    """The first rows of a file, without a look at the others.

    Raises:
        ConfigurationError: as `open_rows`, or one of them is no conversation; its number is in the text.
    """
    _check_present(path, key)
    first = _first_parquet(path, key, most) if path.suffix == PARQUET else _first_lines(path, key, most)
    rows = [parse_row(row, f"{path}:{number}", key) for number, row in first]
    if not rows:
        raise _problem(key, str(path), "at least one row")
    return rows


class JsonlRows:
    """A JSON object a line, found by the offset of the line. Blank lines are none."""

    def __init__(self, path: Path, key: str, ends: np.ndarray | None = None):
        self._path, self._key = path, key
        self._file = path.open("rb")
        ends, size = line_ends(path) if ends is None else ends, path.stat().st_size
        self._bounds = np.concatenate([[0], ends, [size] if size and size not in ends[-1:] else []]).astype(np.int64)
        short = np.flatnonzero(np.diff(self._bounds) <= BLANK_BYTES)
        blank = [line for line in short if not self._read(line).strip()]
        self._lines = np.delete(np.arange(len(self._bounds) - 1), blank)
        """Which lines are rows."""

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Conversation:
        line = self._lines[index]
        place = f"{self._path}:{line + 1}"
        return parse_row(_decode(self._read(line), place, self._key), place, self._key)

    def _read(self, line: int) -> bytes:
        start, end = map(int, self._bounds[line : line + 2])
        return os.pread(self._file.fileno(), end - start, start)


class ParquetRows:
    """The columns of a parquet file, in memory as Arrow holds them."""

    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key
        file = _open_parquet(path, key)
        self._table = file.read(columns=_columns(file)).combine_chunks()

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Conversation:
        row = self._table.slice(index, 1).to_pylist()[0]
        return parse_row(_without_nulls(row), f"{self._path}:{index + 1}", self._key)


def parse_row(row: Any, place: str, key: str) -> Conversation:
    """A conversation from a decoded row. `messages` go before `prompt` and `completion`.

    Raises:
        ConfigurationError: it is none, or shows images.
    """
    if not isinstance(row, dict):
        raise _problem(key, place, "a JSON object a line")
    messages, context = row.get("messages"), 0
    if messages is None:
        if row.get("prompt") is None or not row.get("completion"):
            raise _problem(key, place, f"{FORMS}, none of them empty")
        prompt, completion = _as_messages(row["prompt"], "user"), _as_messages(row["completion"], "assistant")
        messages, context = [*prompt, *completion], len(prompt)
    if not messages or not isinstance(messages, list):
        raise _problem(key, place, "a `messages` list that is not empty")
    return Conversation(
        [_message(message, place, key) for message in messages], _tools(row, place, key), context, place, key
    )


def _as_messages(given: Any, role: str) -> Sequence[Any]:
    """A text is one message; anything else is taken for messages."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    return given if isinstance(given, list) else [given]


def _message(given: Any, place: str, key: str) -> dict[str, Any]:
    """A message as chat templates want it: without nulls, its content there, arguments of tools decoded."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise _problem(key, place, "messages with a `role` each")
    message = {name: value for name, value in given.items() if value is not None}
    content, calls = message.setdefault("content", ""), message.get("tool_calls", [])
    if given.get("content") is None and not calls:
        raise _problem(key, place, "messages with `content`, or with `tool_calls`")
    parts = content if isinstance(content, list) else []
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise _problem(key, place, "messages of text: images train with mode=rl alone")
    if calls:
        listed = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_call(call, place, key) for call in listed]
    return message


def _call(call: Any, place: str, key: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise _problem(key, place, "`tool_calls` of the form {function: {name, arguments}}")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    """Templates write arguments as JSON themselves; a text that is no JSON object stays as the model wrote it."""
    try:
        decoded = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return given
    return {} if decoded is None else decoded if isinstance(decoded, dict) else given


def _tools(row: dict[str, Any], place: str, key: str) -> list[dict[str, Any]] | None:
    """Tools as a chat request has them, from a list or its JSON; {name, description, parameters} stands for one too."""
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    except json.JSONDecodeError:
        tools = [None]  # which is refused below
    if not tools:
        return None
    listed = tools if isinstance(tools, list) else [tools]
    functions = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in listed]
    if any(not isinstance(function, dict) or "name" not in function for function in functions):
        raise _problem(key, place, "`tools` of the form [{type: function, function: {name, description, parameters}}]")
    return [{"type": "function", "function": function} for function in functions]


def _without_nulls(value: Any, name: str = "") -> Any:
    """A parquet value without the nulls of keys that only other rows have; arguments of tools stay as they are."""
    if isinstance(value, dict) and name != "arguments":
        return {key: _without_nulls(inner, key) for key, inner in value.items() if inner is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def line_ends(path: Path, part: int = 0, parts: int = 1) -> np.ndarray:
    """i8: one past every newline in one of so many parts of a file."""
    size = path.stat().st_size
    place, stop = size * part // parts, size * (part + 1) // parts
    found = []
    with path.open("rb") as file:
        file.seek(place)
        while block := file.read(min(SCAN_BYTES, stop - place)):
            found.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + place + 1)
            place += len(block)
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def _first_lines(path: Path, key: str, most: int) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(islice(lines, most), 1):
            if len(line) > BLANK_BYTES or line.strip():
                yield number, _decode(line, f"{path}:{number}", key)


def _first_parquet(path: Path, key: str, most: int) -> Iterator[tuple[int, Any]]:
    file = _open_parquet(path, key)
    for batch in islice(file.iter_batches(most, columns=_columns(file)), 1):
        yield from enumerate(map(_without_nulls, batch.to_pylist()), 1)


def _open_parquet(path: Path, key: str) -> Any:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        expected = "a JSONL file, or pyarrow to read parquet with: pip install 'prime-hpc[parquet]'"
        raise _problem(key, str(path), expected) from error
    try:
        return ParquetFile(path, memory_map=True)
    except pyarrow.ArrowException as error:
        raise _problem(key, str(path), f"a parquet file ({error})") from error


def _columns(file: Any) -> list[str]:
    return [name for name in COLUMNS if name in file.schema_arrow.names]


def _decode(line: bytes, place: str, key: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _problem(key, place, f"a JSON object a line ({error})") from error


def _check_present(path: Path, key: str) -> None:
    if not path.is_file():
        raise _problem(key, str(path), f"an existing JSONL or parquet file, each with {FORMS}")


def _problem(key: str, value: str, expected: str) -> ConfigurationError:
    return ConfigurationError([ConfigProblem(key, value, expected)])
