"""Rollout records: every rollout of a batch, token by token, as zstandard-compressed JSON lines."""

import base64
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import zstandard

from prime_hpc.cluster.files import list_fresh, write_atomic
from prime_hpc.cluster.role import Role
from prime_hpc.errors import CorruptData
from prime_hpc.transport.arrays import Array
from prime_hpc.transport.messages import NOT_SAMPLED, ImageSpan, PolicyVersion, RolloutDone, Sample

SUFFIX = ".jsonl.zst"
OPTIONAL = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
"""Streams that not every sample has."""
NOTHING: Mapping[str, Sample] = MappingProxyType({})


class RolloutRecorder:
    """Writes `step_N.jsonl.zst` into a folder, whole or absent."""

    def __init__(self, role: Role, folder: Path):
        self._role, self._folder = role, folder
        self._lines: dict[int, list[bytes]] = defaultdict(list)

    def add(self, step: int, done: RolloutDone, trained: Mapping[str, Sample] = NOTHING) -> None:
        """Keep a rollout of batch `step` until `flush`.

        `trained` holds the batch's samples by id: their mask and advantages are what the trainer got.
        """
        self._lines[step].append(msgspec.json.encode(_record(step, done, trained)) + b"\n")

    def flush(self, step: int, manifest: "BatchManifest | None" = None) -> None:
        """Write the file of `step` and, where one is given, its manifest, replacing those that an earlier attempt left.

        Raises:
            InfrastructureFailure: this attempt no longer holds the run.
        """
        data = zstandard.ZstdCompressor().compress(b"".join(self._lines.pop(step, [])))
        self._role.lease.check()
        path = record_path(self._folder, step)
        self._role.patience.write(path.name, lambda: write_atomic(path, data))
        if manifest:
            described = msgspec.json.format(msgspec.json.encode(manifest))
            self._role.patience.write(path.name, lambda: write_atomic(manifest_path(path.parent, step), described))
        budget = self._role.config.monitor.rollouts_gib
        if budget is not None:
            _prune(path.parent, int(budget * 2**30))


def _prune(rollouts: Path, budget: int) -> None:
    """Remove the oldest records until at most `budget` bytes are left; the newest stays in any case."""
    steps = recorded_steps(rollouts)
    total = 0
    for i, path in enumerate(record_path(rollouts, step) for step in reversed(steps)):
        total += path.stat().st_size
        if i and total > budget:
            path.unlink()
            manifest_path(rollouts, steps[-1 - i]).unlink(missing_ok=True)


class BatchManifest(msgspec.Struct, kw_only=True):
    """What optimiser step `step` of a lineage trained: samples in order, and where the journal goes on behind it."""

    step: int
    lineage: int
    sample_ids: list[str]
    journal_offset: int
    lr: float | None = None
    """Peak learning rate from this step on, where it was changed while the run worked."""


def manifest_path(rollouts: Path, step: int) -> Path:
    return rollouts / f"step_{step}.json"


def read_batch(rollouts: Path, step: int) -> tuple[BatchManifest, list[Sample], dict[str, bytes]]:
    """Batch `step` with its samples as the trainer got them, stream for stream, and the images of its rollouts.

    Raises:
        CorruptData: records or manifest are missing, or do not fit each other.
    """
    try:
        manifest = msgspec.json.decode(manifest_path(rollouts, step).read_bytes(), type=BatchManifest)
        records = list(read_records(record_path(rollouts, step)))
    except FileNotFoundError as error:
        raise CorruptData(f"{error.filename} is missing: batch {step} was not recorded, or its record has made room "
                          "(monitor.rollouts, monitor.rollouts_gib)") from error  # fmt: skip
    samples = [_to_sample(record["source"], sample) for record in records
               for sample in record["samples"] if sample["trained"]]  # fmt: skip
    if [sample.sample_id for sample in samples] != manifest.sample_ids:
        raise CorruptData(f"{record_path(rollouts, step)} does not hold the samples that its manifest names")
    images = {digest: base64.b64decode(data) for record in records for digest, data in record["images"].items()}
    return manifest, samples, images


def evaluation_folders(rollouts: Path) -> list[Path]:
    """The folders of the sources whose evaluations are recorded, by name."""
    found = (evaluations(rollouts, name) for name in sorted(list_fresh(rollouts / "evaluations")))
    return [path for path in found if path.is_dir()]


def evaluations(rollouts: Path, source: str) -> Path:
    """The folder of the rollouts of evaluations of `source`, by the step after which they were."""
    return rollouts / "evaluations" / source


def record_path(rollouts: Path, step: int) -> Path:
    return rollouts / f"step_{step}{SUFFIX}"


def recorded_steps(rollouts: Path) -> list[int]:
    """The steps whose rollouts are in the folder, in order."""
    return sorted(int(name[len("step_") : -len(SUFFIX)]) for name in list_fresh(rollouts)
                  if name.startswith("step_") and name.endswith(SUFFIX))  # fmt: skip


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The rollouts of one file, in order."""
    with zstandard.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _record(step: int, done: RolloutDone, trained: Mapping[str, Sample]) -> dict[str, Any]:
    rollout = msgspec.structs.asdict(done.rollout)
    samples = [_sample(trained.get(sample.sample_id, sample), sample.sample_id in trained)
               for sample in rollout.pop("samples")]  # fmt: skip
    said = {"messages": msgspec.json.decode(done.messages), "tools": msgspec.json.decode(done.tools)}
    return {"step": step, "worker": done.worker, **rollout, **said, "samples": samples}


def _sample(sample: Sample, trained: bool) -> dict[str, Any]:
    """Streams as lists; numbers of single precision are exact in JSON."""
    return {
        "sample_id": sample.sample_id,
        "trained": trained,
        "adapter": sample.adapter,
        "temperature": sample.temperature,
        "token_ids": sample.token_ids.numpy().tolist(),
        "mask": sample.mask.numpy().astype(int).tolist(),
        "versions": version_runs(sample.versions.numpy()),
        "logprobs": sample.logprobs.numpy().tolist(),
        "images": sample.images,
        **{name: None if (stream := getattr(sample, name)) is None else stream.numpy().tolist() for name in OPTIONAL},
    }


def _to_sample(source: str, record: dict[str, Any]) -> Sample:
    versions = np.full(len(record["token_ids"]), NOT_SAMPLED, dtype=np.int64)
    for version, start, end in record["versions"]:
        versions[start:end] = PolicyVersion.parse(version).pack()
    return Sample(
        sample_id=record["sample_id"],
        source=source,
        adapter=record["adapter"],
        temperature=record["temperature"],
        token_ids=Array.of(record["token_ids"], "i4"),
        mask=Array.of(record["mask"], "bool"),
        logprobs=Array.of(record["logprobs"], "f4"),
        versions=Array.of(versions, "i8"),
        images=msgspec.convert(record["images"], list[ImageSpan]),
        **{name: Array.of(record[name], "f4") for name in OPTIONAL if record[name] is not None},
    )


def version_runs(versions: np.ndarray) -> list[tuple[str, int, int]]:
    """Runs (`lineage.step`, start, end) of equal versions in i8[n]; tokens that were not sampled are in none."""
    edges = np.flatnonzero(np.diff(versions)) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(versions)]
    return [(str(PolicyVersion.unpack(versions[start])), start, end)
            for start, end in zip(starts, ends, strict=True)
            if start < end and versions[start] != NOT_SAMPLED]  # fmt: skip
