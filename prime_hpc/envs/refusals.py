"""Arguments that an environment refuses, told as the mistakes of a configuration that they are."""

from collections.abc import Iterable

from pydantic import ValidationError

from prime_hpc.errors import ConfigProblem, nearest_name

UNKNOWN = "extra_forbidden"
"""pydantic's word for a name that a model does not have."""
PREFIXES = ("Value error, ", "Input should be ")
"""What pydantic's messages begin with."""


def explain(error: ValidationError, known: Iterable[str]) -> str:
    """Every mistake in a source's `args`, of which these are `known`, and `env_args`."""
    names = [name for name in known if name != "id"]
    return "; ".join(_explain(list(map(str, each["loc"])), each, names) for each in error.errors(include_url=False))


def _explain(place: list[str], error: dict, names: list[str]) -> str:
    of_taskset = place[:1] == ["taskset"]
    key = ".".join(["args", *place[1:]] if of_taskset else ["env_args", *place])
    if error["type"] == UNKNOWN and of_taskset and len(place) == 2:
        return str(ConfigProblem(key, error["input"], f"one of {', '.join(names)}", nearest_name(place[1], names)))
    message = error["msg"]
    for prefix in PREFIXES:
        message = message.removeprefix(prefix)
    if error["type"] == "value_error":
        return f"{key}: {message}"
    expected = "nothing of this name" if error["type"] == UNKNOWN else message
    return str(ConfigProblem(key, error["input"], expected))
