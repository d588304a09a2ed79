"""From a composed dictionary to a `RunConfig`, with every mistake of type, name and range at once."""

import dataclasses
import typing
from collections.abc import Mapping
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
          "dict": "a mapping", "dataclass": "a mapping", "tuple": "a list"}  # fmt: skip


def parse(raw: dict[str, Any]) -> RunConfig:
    """Check `raw` against the schema.

    Raises:
        ConfigurationError: with one `ConfigProblem` for each unknown key, wrong type and value out of range.
    """
    problems = find_schema_problems(raw)
    if problems:
        raise ConfigurationError(problems)
    return _adapter.validate_python(raw)


def find_schema_problems(raw: dict[str, Any]) -> list[ConfigProblem]:
    """Every mistake of name, type and range in `raw`, one for each key."""
    try:
        _adapter.validate_python(raw)
    except ValidationError as error:
        by_key: dict[str, ConfigProblem] = {}
        for item in error.errors(include_url=False):
            problem = _problem(item)
            by_key.setdefault(problem.key, problem)
        return list(by_key.values())
    return []


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The plain dictionary of a configuration, ready for JSON or YAML."""
    return _adapter.dump_python(config, mode="json")


def known_keys(path: tuple[str | int, ...] = ()) -> list[str]:
    """Names of the fields of the section at `path`; empty where the schema is free-form."""
    section: Any = RunConfig
    for part in path:
        if isinstance(part, int):
            section = typing.get_args(section)[0]
        elif dataclasses.is_dataclass(section):
            section = typing.get_type_hints(section).get(part)
        else:
            return []
    return [f.name for f in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []


def _problem(item: Mapping[str, Any]) -> ConfigProblem:
    loc, kind, context = item["loc"], item["type"], item.get("ctx", {})
    loc = tuple(p for p in loc if isinstance(p, int) or not p.startswith(("function-", "constrained-")))
    if loc and loc[-1] in ("str", "int", "float", "constrained-str") and kind != "unexpected_keyword_argument":
        loc = loc[:-1]  # the branch of a union
    key = ".".join(str(p) for p in loc)
    if kind == "unexpected_keyword_argument":
        valid = known_keys(loc[:-1])
        return ConfigProblem(key, item["input"], "no such key; known here: " + ", ".join(valid),
                             nearest_name(str(loc[-1]), valid))  # fmt: skip
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
    for name, text in _TYPES.items():
        if kind.startswith(name):
            return ConfigProblem(key, item["input"], text)
    return ConfigProblem(key, item["input"], item["msg"])
