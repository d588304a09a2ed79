"""The figures of an evaluation as people read them."""

import re
from collections.abc import Mapping
from typing import Any

_FIGURE = re.compile(r"eval/(?!.+/rewards/)(?P<source>.+?)/(?P<name>reward|errors|avg@\d+|pass[@^]\d+)")


def newest_evaluation(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the last evaluation in metrics by step; empty before the first."""
    found = ({name: value for name, value in row.items() if name.startswith("eval/")}
             for _, row in sorted(rows.items(), reverse=True))  # fmt: skip
    return next(filter(None, found), {})


def describe_evaluation(row: Mapping[str, Any]) -> list[str]:
    """`held_out: reward 0.25, errors 0, avg@4 0.25, ...`, a line for each source of a row of metrics or a summary."""
    sources: dict[str, list[str]] = {}
    for key, value in row.items():
        if (found := _FIGURE.fullmatch(key)) and value is not None:
            sources.setdefault(found["source"], []).append(f"{found['name']} {value:.4g}")
    return [f"{source}: {', '.join(figures)}" for source, figures in sources.items()]
