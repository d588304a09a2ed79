"""Values that may change while a run works: which, and whether a change makes sense."""

import re
from functools import reduce
from typing import Any

from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse, to_dict
from prime_hpc.errors import ConfigProblem, ConfigurationError, nearest_name

LIVE = ("optimizer.lr", "orchestrator.max_inflight", "orchestrator.max_staleness", "orchestrator.age_discount",
        "env.eval.every", "env.eval.every_s", "env.train.N.ratio")  # fmt: skip
"""N stands for the number of a training source."""


def changed(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """`config` with other values, by key.

    Raises:
        ConfigurationError: with one problem for each key that is not `LIVE`, and for what the values break.
    """
    unknown = [ConfigProblem(key, value, "a key that may change while the run works: " + ", ".join(LIVE),
                             nearest_name(key, list(LIVE)))
               for key, value in values.items() if re.sub(r"\.\d+\.", ".N.", key) not in LIVE]  # fmt: skip
    if unknown:
        raise ConfigurationError(unknown)
    raw = to_dict(config)
    for key, value in values.items():
        _put(raw, key, value)
    made = parse(raw)
    before = find_conflicts(config)
    if problems := [problem for problem in find_conflicts(made) if problem not in before]:
        raise ConfigurationError(problems)
    return made


def take_over(config: RunConfig, other: RunConfig, keys: list[str]) -> None:
    """Set the values at `keys` as they are in `other`; whoever holds a section of `config` sees them."""
    for key in keys:
        *path, last = key.split(".")
        target, source = config, other
        for name in path:
            target, source = _step(target, name), _step(source, name)
        setattr(target, last, getattr(source, last))


def in_force(config: RunConfig) -> dict[str, Any]:
    """Every value of `config` that may change while the run works, by key."""
    keys = [key.replace(".N.", f".{i}.") for key in LIVE for i in range(len(config.env.train) if ".N." in key else 1)]
    return {key: reduce(_step, key.split("."), config) for key in keys}


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    section: Any = raw
    for name in path:
        if isinstance(section, list) and int(name) >= len(section):
            raise ConfigurationError([ConfigProblem(key, value, f"a training source below {len(section)}")])
        section = section[int(name)] if isinstance(section, list) else section[name]
    section[last] = value


def _step(section: Any, name: str) -> Any:
    return section[int(name)] if isinstance(section, list) else getattr(section, name)
