"""Hydra's side of the configuration: where `conf/` lies, tolerant overrides, and the origin of every value."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigIndexError

from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.errors import ConfigProblem, ConfigurationError, nearest_name

GROUPS = ("experiment", "model", "algorithm", "loss", "optimizer", "env", "inference", "orchestrator", "trainer",
          "cluster", "launcher")  # fmt: skip
PRIMARY = "run"


def conf_dir() -> Path:
    """The product's `conf/`: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def compose_run(arguments: list[str]) -> RunConfig:
    """The configuration that `prime_hpc.launch` would make of these arguments, checked against the schema only."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = OmegaConf.to_container(compose(PRIMARY, overrides=tolerant(arguments)), resolve=True)
    return parse(cast(dict[str, Any], composed))


def tolerant(arguments: list[str]) -> list[str]:
    """Command-line overrides with `key=value` turned into `++key=value`.

    Hydra would stop at the first unknown key; so every value gets in, and the schema reports all mistakes at once.
    Choices of groups, Hydra's own settings and flags stay as they are.
    """
    return [f"++{a}" if _is_value(a) else a for a in arguments]


def unknown_choices(arguments: list[str], search_path: list[Path]) -> list[ConfigProblem]:
    """Choices of a group for which no file exists, with the nearest that does."""
    problems = []
    for argument in arguments:
        key, _, choices = argument.lstrip("+").partition("=")
        if key not in GROUPS or argument.startswith("-"):
            continue
        valid = options(key, search_path)
        bad = [c.strip() for c in choices.split(",") if c.strip() not in valid]
        expected = f"one of {', '.join(valid)}" if valid else f"{key}.KEY=VALUE, since this group has no files"
        problems += [ConfigProblem(key, c, expected, nearest_name(c, valid)) for c in bad]
    return problems


def absent_folders(search_path: list[Path]) -> list[ConfigProblem]:
    """Configuration folders that do not exist, with the nearest beside them that does."""
    problems = []
    for folder in search_path:
        if not folder.is_dir():
            beside = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
            nearest = nearest_name(folder.name, beside)
            problems.append(ConfigProblem("--config-dir", str(folder), "an existing folder",
                                          nearest and str(folder.with_name(nearest))))  # fmt: skip
    return problems


def explain(error: CompactHydraException) -> str:
    """What Hydra could not compose; of an element that a list does not have, what to write in its place."""
    found = re.match(r"Error merging override \+*([\w.]+)\.\d+(?:\.[\w.]+)?=", str(error))
    if found is None or not isinstance(error.__cause__, ConfigIndexError):
        return "\n".join(filter(None, [str(error), str(error.__cause__ or "")]))
    key, _, value = str(error).removeprefix("Error merging override ").lstrip("+").partition("=")
    expected = f"an element that the list has; to add one, write the whole list: {found[1]}=[..., ...]"
    return str(ConfigurationError([ConfigProblem(key, value, expected)]))


def explain_yaml(error: yaml.YAMLError) -> str:
    """Where a file of the configuration is no YAML, and why."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    mark = error.problem_mark
    line = "".join(Path(mark.name).read_text().splitlines()[mark.line : mark.line + 1])
    problem = ConfigProblem(f"{mark.name}, line {mark.line + 1}", line, f"YAML ({error.problem})")
    return str(ConfigurationError([problem]))


def misplaced(experiment: str, values: Any) -> ConfigProblem:
    """Keys that an experiment's file has put below `experiment`."""
    keys = ", ".join(values) if isinstance(values, dict) else values
    return ConfigProblem("experiment", experiment, "a file that begins with the line `# @package _global_`, without "
                         f"which its keys ({keys}) lie below `experiment`")  # fmt: skip


def options(group: str, search_path: list[Path]) -> list[str]:
    """Names of the files of a group in all configuration folders."""
    return sorted({p.stem for root in search_path for p in (root / group).glob("*.yaml")})


@dataclass(frozen=True)
class Layer:
    """One source of values: its name, and the keys it sets as a nested dictionary."""

    name: str
    values: dict[str, Any]


def layers(choices: dict[str, str], overrides: list[str], search_path: list[Path]) -> list[Layer]:
    """Everything that set a value, strongest first: command line, experiment, other groups, the primary file."""
    found = [Layer("command line", _nested(overrides))]
    for group in sorted(choices, key=lambda g: g != "experiment"):
        option = choices[group]
        if group.startswith("hydra/") or option is None:
            continue
        values = _load(f"{group}/{option}", search_path)
        found.append(Layer(f"{group}/{option}", values if group == "experiment" else {group: values}))
    found.append(Layer("conf/run.yaml", _load(PRIMARY, search_path)))
    return found


def origin(path: tuple[str, ...], stack: list[Layer]) -> str:
    """The name of the strongest layer that sets the value at `path`, or `default`."""
    return next((layer.name for layer in stack if _sets(layer.values, path)), "default")


def annotated_yaml(config: dict[str, Any], stack: list[Layer]) -> str:
    """The resolved configuration as YAML, each value followed by a comment with its origin."""
    return "\n".join(_lines(config, (), stack)) + "\n"


def _lines(section: dict[str, Any], path: tuple[str, ...], stack: list[Layer]) -> list[str]:
    lines = []
    for key, value in section.items():
        here, indent = (*path, key), "  " * len(path)
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_lines(value, here, stack)]
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
            lines.append(f"{indent}{key}: {text}  # {origin(here, stack)}")
    return lines


def _is_value(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    plain = bool(equals) and key[:1] not in ("+", "~", "-") and "@" not in key
    return plain and key not in GROUPS and key.split(".")[0] != "hydra" and not key.startswith("hydra/")


def _nested(overrides: list[str]) -> dict[str, Any]:
    """The keys that overrides set; below one that was set as a whole there is nothing to tell apart."""
    values: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.key_or_group in GROUPS:
            continue
        node = values
        *parents, leaf = override.key_or_group.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if node is True:
                break
        else:
            node[leaf] = True
    return values


def _load(name: str, search_path: list[Path]) -> dict[str, Any]:
    for root in search_path:
        path = root / f"{name}.yaml"
        if path.exists():
            return yaml.safe_load(path.read_text()) or {}
    return {}


def _sets(values: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        if not isinstance(values, dict):
            return True  # a whole mapping or list was set at once
        if part not in values:
            return False
        values = values[part]
    return True
