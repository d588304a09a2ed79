"""Metrics of a run: one JSON object a line in `metrics.jsonl`, and W&B where it is wanted."""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_hpc.cluster.files import append
from prime_hpc.cluster.role import Role
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.transport.checkpoints import read_manifest

Row = dict[str, Any]


class Monitor:
    """The one writer of a run's metrics. Names are in docs/metrics.md.

    The first monitor of a later attempt writes a mark with the step it goes on from: rows past that step, by an
    earlier attempt, are superseded.
    """

    def __init__(self, role: Role):
        self._log = role.log
        self._warned: set[str] = set()
        _drop_torn_line(role.paths.metrics)
        rows = list(_rows(role.paths.metrics))
        self._file = role.paths.metrics.open("ab", buffering=0)
        self._patience = role.patience
        attempt = role.plan.attempt
        if rows and max(row.get("attempt", 1) for row in rows) < attempt:
            self._write({"attempt": attempt, "resumed_from": _start_step(role), "time": time.time()})
        self._wandb = _start_wandb(role) if role.config.monitor.wandb != "off" else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add a row. A value that is not finite becomes null; the first one of a name is warned about."""
        row = {"step": step, "time": time.time(), **{name: self._finite(name, v) for name, v in metrics.items()}}
        self._write(row)
        if self._wandb:
            self._wandb.log({name: value for name, value in row.items() if value is not None and name != "time"})

    def close(self) -> None:
        self._file.close()
        if self._wandb:
            self._wandb.finish()

    def _write(self, row: Row) -> None:
        self._patience.write("metrics.jsonl", lambda: append(self._file, json.dumps(row).encode() + b"\n"))

    def _finite(self, name: str, value: float) -> float | None:
        if math.isfinite(value):
            return value
        if name not in self._warned:
            self._warned.add(name)
            self._log.warning("metric %s is %s; it is written as null", name, value)
        return None


def read_metrics(path: Path) -> dict[int, Row]:
    """Metrics by step, in order: rows of one step are merged, the later value of a name wins.

    Rows that a resume went back behind are left out, and so is a last line that is still being written.
    """
    steps: dict[int, Row] = {}
    for row in _rows(path):
        if "resumed_from" in row:
            steps = {step: known for step, known in steps.items() if step <= row["resumed_from"]}
        else:
            steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


def _rows(path: Path) -> Iterator[Row]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


def _drop_torn_line(path: Path) -> None:
    """Cut what a process that died in the middle of a line left behind."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _start_step(role: Role) -> int:
    return read_manifest(Path(role.plan.checkpoint)).step if role.plan.checkpoint else 0


def _start_wandb(role: Role) -> Any:
    """A W&B run whose id is the run's name, so that a later attempt goes on in the same run. Points of different sweeps
    may have the same name: their ids begin with the sweep's.

    Raises:
        ConfigurationError: the package or, online, the key is missing.
    """
    monitor, sweep = role.config.monitor, role.paths.sweep
    mode = monitor.wandb
    try:
        import wandb
    except ImportError as error:
        expected = "off, or the package: pip install 'prime-hpc[wandb]'"
        raise ConfigurationError([ConfigProblem("monitor.wandb", mode, expected)]) from error
    if mode == "online" and not os.environ.get("WANDB_API_KEY"):
        raise ConfigurationError([ConfigProblem("monitor.wandb", mode, "offline, or WANDB_API_KEY in the environment")])
    run = wandb.init(
        project=monitor.wandb_project,
        entity=monitor.wandb_entity,
        group=monitor.wandb_group or sweep,
        tags=monitor.wandb_tags or None,
        notes=monitor.wandb_notes,
        name=role.plan.name,
        id=f"{sweep}.{role.plan.name}" if sweep else role.plan.name,
        resume="allow",
        mode=mode,
        dir=role.paths.root,
        config=role.plan.config,
    )
    # W&B refuses rows whose own step goes back, as after a resume; an axis of ours has no such rule.
    run.define_metric("*", step_metric="step")
    return run
