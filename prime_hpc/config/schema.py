"""From a composed dictionary to a `RunConfig`, with every mistake of type, name and range at once."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError, nearest_name

_adapter = TypeAdapter(RunConfig)
_NUMBERS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
}
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "list": "a list",
          "tuple": "a list", "dict": "a mapping", "dataclass": "a mapping",
          "model_attributes": "a mapping"}  # fmt: skip


def parse(raw: dict[str, Any], folder: Path | None = None) -> RunConfig:
    """Check `raw` against the schema.

    Args:
        folder: where relative paths of the user's files begin, which become absolute; left as they are without it.

    Raises:
        ConfigurationError: with one `ConfigProblem` for each unknown key, wrong type and value out of range.
    """
    problems = find_schema_problems(raw)
    if problems:
        raise ConfigurationError(problems)
    return _adapter.validate_python(raw, context={"folder": folder})


def find_schema_problems(raw: dict[str, Any]) -> list[ConfigProblem]:
    """Every mistake of name, type and range in `raw`, one for each key."""
    try:
        _adapter.validate_python(raw)
    except ValidationError as error:
        by_key: dict[str, ConfigProblem] = {}
        for item in error.errors(include_url=False):
            problem = _problem(item)
            first = by_key.setdefault(problem.key, problem)
            if first is not problem and item["type"] == "literal_error":  # a word that stands for a number
                expected = f"{first.expected}, or {problem.expected.removeprefix('one of ')}"
                by_key[problem.key] = dataclasses.replace(first, expected=expected)
        return list(by_key.values())
    return []


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The plain dictionary of a configuration, ready for JSON or YAML."""
    return _adapter.dump_python(config, mode="json")


def known_keys(path: tuple[str | int, ...] = ()) -> list[str]:
    """Names of the fields of the section at `path`, of every variant of it where there are several; empty where the
    schema is free-form."""
    _, sections = _descend(path)
    return list(dict.fromkeys(f.name for section in sections for f in dataclasses.fields(section)))


def variant_name(section: type) -> str | None:
    """The `name` that chooses this section among variants."""
    default = next((f.default for f in dataclasses.fields(section) if f.name == "name"), None)
    return default if isinstance(default, str) else None


def sections_in(hint: Any) -> list[type]:
    """The dataclasses that a type hint may hold: itself, the elements of a list, the variants of a union."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [section for argument in typing.get_args(hint) for section in sections_in(argument)]


def _descend(path: tuple[str | int, ...]) -> tuple[list[str | int], list[type]]:
    """The keys of a location, without the names of variants that pydantic puts between them, and where it leads."""
    keys: list[str | int] = []
    sections: list[type] = [RunConfig]
    named = False
    for part in path:
        if named:  # a name of the user's, below which the section begins
            keys.append(part)
            named = False
            continue
        if len(sections) > 1 and (chosen := [s for s in sections if variant_name(s) == part]):
            sections = chosen
            continue
        keys.append(part)
        if not isinstance(part, int):
            hints = [typing.get_type_hints(section).get(part) for section in sections]
            named = any(typing.get_origin(hint) is dict for hint in hints)
            sections = list(dict.fromkeys(inner for hint in hints for inner in sections_in(hint)))
    return keys, sections


def _problem(item: Mapping[str, Any]) -> ConfigProblem:
    loc, kind, context = item["loc"], item["type"], item.get("ctx", {})
    loc = tuple(p for p in loc if isinstance(p, int) or not p.startswith(("function-", "constrained-", "[key]")))
    scalar = bool(loc) and (loc[-1] in ("str", "int", "float", "constrained-str") or "literal[" in str(loc[-1]))
    if scalar and kind != "unexpected_keyword_argument":
        loc = loc[:-1]  # the branch of a union
    keys, sections = _descend(loc)
    key = ".".join(str(p) for p in keys)
    if kind == "unexpected_keyword_argument":
        valid = known_keys(loc[:-1])
        return ConfigProblem(key, item["input"], "no such key; known here: " + ", ".join(valid),
                             nearest_name(str(loc[-1]), valid))  # fmt: skip
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        valid = [name for section in sections if (name := variant_name(section))]
        given = context.get("tag")
        return ConfigProblem(f"{key}.name", given, "one of " + ", ".join(valid), nearest_name(str(given), valid))
    if kind == "missing_argument" or kind == "missing":
        return ConfigProblem(key, None, "a value, it has no default")
    if kind == "literal_error":
        valid = [name.strip("' ") for name in context["expected"].replace(" or ", ", ").split(",")]
        return ConfigProblem(key, item["input"], "one of " + ", ".join(valid), nearest_name(str(item["input"]), valid))
    if kind in _NUMBERS:
        bound, text = _NUMBERS[kind]
        return ConfigProblem(key, item["input"], text.format(context[bound]))
    if kind == "string_pattern_mismatch":
        return ConfigProblem(key, item["input"], f"text that matches {context['pattern']}")
    if kind == "string_type" and isinstance(item["input"], int | float) and not isinstance(item["input"], bool):
        return ConfigProblem(key, item["input"], "text in quotes: without them YAML reads some texts as numbers")
    for name, text in _TYPES.items():
        if kind.startswith(name):
            return ConfigProblem(key, item["input"], text)
    return ConfigProblem(key, item["input"], item["msg"])
