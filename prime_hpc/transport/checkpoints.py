"""Checkpoints as every role sees them: `checkpoints/step_N/` is complete or absent. No torch in here.

The trainer writes under a temporary name; the manifest is the last file, then the directory gets its final name.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from prime_hpc.cluster.files import list_fresh, write_atomic
from prime_hpc.errors import ConfigProblem, ConfigurationError, CorruptData, SchemaMismatch
from prime_hpc.plan.run_plan import Fork
from prime_hpc.transport.weights import MANIFEST, FileEntry, digest_file

CHECKPOINT_SCHEMA = 1
PREFIX = "step_"


class CheckpointManifest(msgspec.Struct, kw_only=True):
    """What a checkpoint holds. `journal_offset` is where the orchestrator's journal goes on after batch `step`.

    `report` is what was measured in that step, null where not finite: ranks that died before they could hand it over do
    so when they have come back to it.
    """

    schema: int = CHECKPOINT_SCHEMA
    step: int
    lineage: int
    world: int
    journal_offset: int
    files: dict[str, FileEntry]
    config: dict[str, Any]
    report: dict[str, float | None] = {}


def partial_path(directory: Path, step: int) -> Path:
    """Where checkpoint `step` lies while it is written."""
    return directory / f".{PREFIX}{step}.partial"


def describe(path: Path) -> FileEntry:
    """Size and digest of one written file."""
    return FileEntry(bytes=path.stat().st_size, digest=digest_file(path))


def publish(partial: Path, manifest: CheckpointManifest) -> Path:
    """Seal `partial` with its manifest and give it its final name. An older checkpoint of the step is replaced."""
    write_atomic(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    final = partial.parent / f"{PREFIX}{manifest.step}"
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    return final


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint.

    Raises:
        CorruptData: it is missing or cannot be read.
        SchemaMismatch: it is of another schema version.
    """
    path = checkpoint / MANIFEST
    try:
        raw = path.read_bytes()
        schema = msgspec.json.decode(raw, type=dict).get("schema")
        if schema != CHECKPOINT_SCHEMA:
            raise SchemaMismatch(f"{path} has schema {schema!r}; this installation reads {CHECKPOINT_SCHEMA}")
        return msgspec.json.decode(raw, type=CheckpointManifest)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError) as error:
        raise CorruptData(f"{path} cannot be read: {error}; resume from another checkpoint") from error


def verify(checkpoint: Path) -> CheckpointManifest:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CorruptData: the manifest or a file is missing, cut or changed; its name is in the text.
        SchemaMismatch: the manifest is of another schema version.
    """
    manifest = read_manifest(checkpoint)
    for name, entry in manifest.files.items():
        path = checkpoint / name
        size = path.stat().st_size if path.exists() else None
        if size != entry.bytes:
            raise CorruptData(f"{path} has {size} bytes, its manifest says {entry.bytes}: the file is missing or cut; "
                              "resume from another checkpoint")  # fmt: skip
        if digest_file(path) != entry.digest:
            raise CorruptData(f"{path} does not match its digest: the file was changed or damaged; "
                              "resume from another checkpoint")  # fmt: skip
    return manifest


def complete_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, in rising order."""
    steps = [int(name[len(PREFIX) :]) for name in list_fresh(directory)
             if name.startswith(PREFIX) and name[len(PREFIX) :].isdigit()]  # fmt: skip
    return sorted(step for step in steps if (directory / f"{PREFIX}{step}" / MANIFEST).exists())


def newest_first(directory: Path, forks: Sequence[Fork] = ()) -> list[Path]:
    """Complete checkpoints, without those that a fork of the run's history has abandoned."""
    return [path for path, manifest in reversed(_by_age(directory))
            if all(manifest.step <= fork.step for fork in forks if fork.lineage > manifest.lineage)]  # fmt: skip


def oldest_offset(directory: Path) -> int:
    """The smallest `journal_offset` of all complete checkpoints, 0 where there is none."""
    return min((manifest.journal_offset for _, manifest in _by_age(directory)), default=0)


def find_latest(directory: Path, forks: Sequence[Fork] = ()) -> Path | None:
    """The newest complete checkpoint that was not abandoned, or None."""
    return next(iter(newest_first(directory, forks)), None)


def resolve(directory: Path, which: str, forks: Sequence[Fork] = ()) -> Path:
    """The checkpoint that `which` names: `latest`, a step, or a path.

    Raises:
        ConfigurationError: there is no such complete checkpoint.
    """
    if which == "latest":
        found = find_latest(directory, forks)
    elif which.isdigit():
        found = directory / f"{PREFIX}{which}"
    else:
        found = Path(which).absolute()
    if found is None or not (found / MANIFEST).exists():
        steps = ", ".join(map(str, complete_steps(directory))) or "none"
        expected = f"`latest`, a step or the path of a complete checkpoint; steps in {directory}: {steps}"
        if which == "latest" and found is None:
            expected = f"a complete checkpoint, and there is none in {directory}; resume=auto starts anew then"
        raise ConfigurationError([ConfigProblem("resume", which, expected)])
    return found


def prune(directory: Path, keep_last: int, keep_every: int) -> list[int]:
    """Delete complete checkpoints but the newest `keep_last` and multiples of `keep_every`; returns what went."""
    removed = []
    for path, manifest in _by_age(directory)[:-keep_last]:
        if not keep_every or manifest.step % keep_every:
            # renamed first: a deletion that is cut short must not leave a directory that looks complete
            condemned = path.with_name(f".{path.name}.removed")
            os.replace(path, condemned)
            shutil.rmtree(condemned)
            removed.append(manifest.step)
    return removed


def remove_partials(directory: Path) -> None:
    """Delete what an earlier attempt left unfinished."""
    for name in list_fresh(directory):
        if name.startswith(f".{PREFIX}"):
            shutil.rmtree(directory / name)


def _by_age(directory: Path) -> list[tuple[Path, CheckpointManifest]]:
    """Complete checkpoints, oldest first. One whose manifest cannot be read, or that is just being pruned, is none."""
    found = []
    for path in (directory / f"{PREFIX}{step}" for step in complete_steps(directory)):
        with suppress(CorruptData):
            found.append((path, read_manifest(path)))
    return sorted(found, key=lambda pair: (pair[1].lineage, pair[1].step))
