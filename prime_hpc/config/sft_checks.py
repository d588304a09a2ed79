"""Checks of `mode=sft`: its rows, its batches, and keys that it would ignore."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.run import RunConfig
from prime_hpc.config.sft_rows import DATA, VALIDATION_DATA, read_first
from prime_hpc.config.sizes import rows_at_once
from prime_hpc.config.trainer import SFTConfig, SFTValidation
from prime_hpc.errors import ConfigProblem, ConfigurationError

ROWS_READ = 100
"""Of the data at launch; the trainer reads all."""
SAMPLING = ("algorithm", "loss", "env", "inference", "frozen", "update", "orchestrator", "pause",
            "model.served_name", "monitor.rollouts", "monitor.rollouts_gib", "trainer.share_gpu",
            "trainer.router_replay", "trainer.batch_timeout_s", "trainer.replay", "trainer.bench")  # fmt: skip
"""Keys of what mode=sft does not have: tasks, engines, an orchestrator, a policy gradient, other modes."""
UNUSED = "to be left out: mode=sft trains on rows of messages by cross-entropy and samples nothing from engines"


def find_sft_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Everything that mode=sft cannot take."""
    yield from _ignored(config)
    yield from _files(config.trainer.sft)
    yield from _validation(config.trainer.sft.validation)
    yield from _batches(config)


def _files(sft: SFTConfig) -> Iterator[ConfigProblem]:
    """Missing files, mistakes in the rows that a launch has time to read, and shares of some files alone."""
    if not sft.data:
        yield ConfigProblem(DATA, [], "the path of a file of rows, JSONL or parquet, or a list of such files")
    for key, files in ((DATA, sft.data), (VALIDATION_DATA, sft.validation.data)):
        for file in files:
            try:
                read_first(Path(file.path), key, ROWS_READ)
            except ConfigurationError as error:
                yield from error.problems
    shares = [file.share for file in sft.data]
    if None in shares and any(shares):
        i = shares.index(None)
        yield ConfigProblem(f"{DATA}.{i}.share", None, "a share, as other files have one; or none has")


def _validation(validation: SFTValidation) -> Iterator[ConfigProblem]:
    section = "trainer.sft.validation"
    if validation.every and not validation.data and not validation.rows:
        yield ConfigProblem(f"{section}.data", [], "a file of rows, or rows of trainer.sft.data by "
                            f"{section}.rows, since {section}.every={validation.every}")  # fmt: skip
    if validation.data and validation.rows:
        yield ConfigProblem(f"{section}.rows", validation.rows, f"0, since {section}.data has all rows")
    if not validation.every and (validation.data or validation.rows):
        yield ConfigProblem(f"{section}.every", 0, "steps between validations, as there are rows for them")
    for i, file in enumerate(validation.data):
        if file.share is not None:
            yield ConfigProblem(f"{VALIDATION_DATA}.{i}.share", file.share, "none: a validation takes every row once")


def _batches(config: RunConfig) -> Iterator[ConfigProblem]:
    sft, rows = config.trainer.sft, rows_at_once(config)
    if sft.batch_size % rows:
        yield ConfigProblem("trainer.sft.batch_size", sft.batch_size,
                            f"a multiple of the {rows} rows that trainer.ranks compute at once")  # fmt: skip
    if sft.last_reply_only and "assistant" not in sft.roles:
        yield ConfigProblem("trainer.sft.last_reply_only", True,
                            "false, or assistant among trainer.sft.roles, whose last message is meant")  # fmt: skip
    if sft.probe.stop_at is not None and not sft.probe.every:
        yield ConfigProblem("trainer.sft.probe.every", 0, "steps between probes, since stop_at needs them")


def _ignored(config: RunConfig) -> Iterator[ConfigProblem]:
    default = RunConfig()
    for key in SAMPLING:
        yield from (ConfigProblem(name, value, UNUSED) for name, value in
                    _changes(key, _value(config, key), _value(default, key)))  # fmt: skip


def _changes(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Keys at or below `key` that differ from their default; of another variant of a section, its name."""
    if is_dataclass(value) and type(value) is type(default):
        for field in fields(value):
            yield from _changes(f"{key}.{field.name}", getattr(value, field.name), getattr(default, field.name))
    elif is_dataclass(value):
        yield f"{key}.name", getattr(value, "name", None)
    elif value != default:
        yield key, _names(value)


def _names(value: Any) -> Any:
    """Of sources their ids and of models their names, whose sections are too long to show; else the value."""
    if isinstance(value, list):
        return [getattr(item, "id", item) for item in value]
    return list(value) if isinstance(value, dict) else value


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
