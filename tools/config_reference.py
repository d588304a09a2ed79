"""Write docs/configuration.md from the schema: `python -m tools.config_reference [--check]`.

Keys, types, bounds and defaults come from the dataclasses in `prime_hpc/config`, meanings from the docstrings under
their fields, so that the reference cannot disagree with what a run accepts.
"""

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import sections_in, variant_name

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

Every key of a run, made from the schema by `python -m tools.config_reference`. Groups of ready choices lie in `conf/`
(`algorithm=max_rl`, `loss=ipo`, `launcher=dry_run`, `+experiment=reverse_text`); a single key is set on the command
line by its dotted name:

    python -m prime_hpc.launch +experiment=reverse_text_cpu max_steps=20 optimizer.lr=3e-5

A folder of your own groups is added with `--config-dir FOLDER`. All mistakes of name, type and range are printed at
once, with the nearest valid name. The resolved configuration lies in the run's `config.yaml`, each value followed by
where it came from (default, group, experiment or command line).

Relative paths begin in the folder of the launch, and become absolute where something lies there, so that commands work
from any folder. An element of a list is changed by its number (`env.train.0.ratio=2`); one more needs the whole list
(`'env.train=[{id: A}, {id: B}]'`).
"""
TYPE_NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "mapping",
    types.NoneType: "null",
}

NAMED_BY = {"guard": "METRIC"}
"""What the names are of sections that the user names, where it is not plain."""


def reference() -> str:
    """The whole page."""
    page, first_keys, repeated = INTRODUCTION, {}, ()
    for key, variants in _sections("", [RunConfig]):
        first = first_keys.setdefault(variants[0], key)
        if key.startswith(repeated):
            continue
        if first != key:
            repeated += (f"{key}.", f"{key}[]")
        page += _again(key, first) if first != key else _variants(key, variants)
    return page


def _sections(key: str, variants: list[type]) -> Iterator[tuple[str, list[type]]]:
    """A section and those inside it, depth first: its dotted key and the variants that `name` chooses from."""
    yield key, variants
    shown = set()
    for section in variants:
        for name, hint in typing.get_type_hints(section).items():
            inner = sections_in(hint)
            if inner and name not in shown:
                shown.add(name)
                yield from _sections(f"{key}.{name}{_within(name, hint)}".lstrip("."), inner)


def _within(name: str, hint: Any) -> str:
    """What stands for one of several sections in a key."""
    return {list: "[]", dict: f".{NAMED_BY.get(name, 'NAME')}"}.get(get_origin(hint), "")


def _again(key: str, first: str) -> str:
    return f"\n## `{key}`\n\nThe same keys as `{first}`.\n"


def _variants(key: str, variants: list[type]) -> str:
    """What variants share comes first; each then lists only the keys of its own."""
    if len(variants) == 1:
        return _section(f"`{key}`" if key else "Top level", variants[0], dataclasses.fields(variants[0]))
    shared = list(dict.fromkeys(base for v in variants for base in v.__bases__ if dataclasses.is_dataclass(base)))
    parts = [(f"`{key}`", base) for base in shared] + [(f"`{key}` with `name: {variant_name(v)}`", v) for v in variants]
    return "".join(_section(title, part, _own(part)) for title, part in parts)


def _own(section: type) -> list[dataclasses.Field]:
    """The fields that a dataclass declares itself, `name` aside."""
    declared = inspect.get_annotations(section)
    return [field for field in dataclasses.fields(section) if field.name in declared and field.name != "name"]


def _section(title: str, section: type, fields: Sequence[dataclasses.Field]) -> str:
    hints, meanings = typing.get_type_hints(section, include_extras=True), _meanings(section)
    rows = [
        f"| `{field.name}` | {_type(hints[field.name])} | {_default(field)} | {_cell(meanings[field.name])} |"
        for field in fields
        if not _stands_alone(hints[field.name])
    ]
    table = ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]
    return "\n".join(["", f"## {title}", "", inspect.getdoc(section) or "", "", *(table if rows else []), ""])


def _stands_alone(hint: Any) -> bool:
    """Whether a field is a section that is always there, or a choice of variants that is."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return bool(sections_in(inner)) and get_origin(inner) not in (list, dict) and types.NoneType not in get_args(inner)


def _meanings(section: type) -> dict[str, str]:
    """Docstrings under the fields of a dataclass and of those it inherits from, by name of the field."""
    meanings: dict[str, str] = {}
    for base in reversed([c for c in section.__mro__ if dataclasses.is_dataclass(c)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        meanings |= {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in zip(body, body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
    return meanings


def _type(hint: Any) -> str:
    """A type in the words of a YAML file."""
    origin, args = get_origin(hint), get_args(hint)
    if origin not in (list, dict, Annotated) and sections_in(hint):
        return "section, or null"
    if origin is Annotated:
        return ", ".join([_type(args[0]), *_bounds(hint.__metadata__)])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_type(arg) for arg in args)
    if origin is list:
        return f"list of {'mappings' if dataclasses.is_dataclass(args[0]) else _type(args[0])}"
    if origin is tuple:
        return f"list of {len(args)} {_type(args[0])}s"
    return TYPE_NAMES[origin or hint]


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    """Bounds of an annotated field, e.g. `at least 1`."""
    for item in (bound for field in metadata if isinstance(field, FieldInfo) for bound in field.metadata):
        match item:
            case annotated_types.Ge(ge):
                yield f"at least {ge}"
            case annotated_types.Gt(gt):
                yield f"more than {gt}"
            case annotated_types.Le(le):
                yield f"at most {le}"
            case annotated_types.Lt(lt):
                yield f"less than {lt}"


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return "required"
    if isinstance(value, list | tuple):
        value = [dataclasses.asdict(item) if dataclasses.is_dataclass(item) else item for item in value]
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix('...' + chr(10)).strip()}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    if not parser.parse_args().check:
        REFERENCE.write_text(reference())
    elif REFERENCE.read_text() != reference():
        sys.exit(f"{REFERENCE} is out of date: run 'python -m tools.config_reference'")


if __name__ == "__main__":
    main()
