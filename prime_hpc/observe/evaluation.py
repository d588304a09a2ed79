"""The figures of an evaluation as people read them."""

import re
from collections.abc import Mapping
from typing import Any

_FIGURE = re.compile(r"eval/(?!.+/rewards/)(?P<source>.+?)/(?P<name>reward|errors|avg@\d+|pass[@^]\d+)")
_OUTCOME = re.compile(r"eval/(?P<source>[^/]+)/(?:reward|errors)")


def evaluated_sources(row: Mapping[str, Any]) -> list[str]:
    """The sources that a row of metrics has figures of."""
    return list(dict.fromkeys(found["source"] for name in row if (found := _OUTCOME.fullmatch(name))))


def newest_evaluation(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the last evaluation of each source in metrics by step; empty before the first."""
    newest: dict[str, dict[str, Any]] = {}
    for _, row in sorted(rows.items()):
        for source in evaluated_sources(row):
            newest[source] = {name: value for name, value in row.items() if name.startswith(f"eval/{source}/")}
    return {name: value for figures in newest.values() for name, value in figures.items()}


def describe_evaluation(row: Mapping[str, Any]) -> list[str]:
    """`held_out: reward 0.25, errors 0, avg@4 0.25, ...`, a line for each source of a row of metrics or a summary."""
    sources: dict[str, list[str]] = {}
    for key, value in row.items():
        if (found := _FIGURE.fullmatch(key)) and value is not None:
            sources.setdefault(found["source"], []).append(f"{found['name']} {value:.4g}")
    return [f"{source}: {', '.join(figures)}" for source, figures in sources.items()]
