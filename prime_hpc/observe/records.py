"""Rollout records: every rollout of a batch, token by token, as zstandard-compressed JSON lines."""

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
from prime_hpc.transport.messages import NOT_SAMPLED, PolicyVersion, RolloutDone, Sample

SUFFIX = ".jsonl.zst"
NOTHING: Mapping[str, Sample] = MappingProxyType({})


class RolloutRecorder:
    """Writes `rollouts/step_N.jsonl.zst`, whole or absent."""

    def __init__(self, role: Role):
        self._role = role
        self._lines: dict[int, list[bytes]] = defaultdict(list)

    def add(self, step: int, done: RolloutDone, trained: Mapping[str, Sample] = NOTHING) -> None:
        """Keep a rollout of batch `step` until `flush`.

        `trained` holds the batch's samples by id: their mask and advantages are what the trainer got.
        """
        self._lines[step].append(msgspec.json.encode(_record(step, done, trained)) + b"\n")

    def flush(self, step: int) -> None:
        """Write the file of `step`, replacing one that an earlier attempt left.

        Raises:
            InfrastructureFailure: this attempt no longer holds the run.
        """
        data = zstandard.ZstdCompressor().compress(b"".join(self._lines.pop(step, [])))
        self._role.lease.check()
        path = record_path(self._role.paths.rollouts, step)
        self._role.patience.write(path.name, lambda: write_atomic(path, data))
        budget = self._role.config.monitor.rollouts_gib
        if budget is not None:
            _prune(path.parent, int(budget * 2**30))


def _prune(rollouts: Path, budget: int) -> None:
    """Remove the oldest records until at most `budget` bytes are left; the newest stays in any case."""
    steps = sorted(int(name[len("step_") : -len(SUFFIX)]) for name in list_fresh(rollouts) if name.endswith(SUFFIX)
                   and not name.startswith("."))  # fmt: skip
    total = 0
    for i, path in enumerate(record_path(rollouts, step) for step in reversed(steps)):
        total += path.stat().st_size
        if i and total > budget:
            path.unlink()


def record_path(rollouts: Path, step: int) -> Path:
    return rollouts / f"step_{step}{SUFFIX}"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The rollouts of one file, in order."""
    with zstandard.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _record(step: int, done: RolloutDone, trained: Mapping[str, Sample]) -> dict[str, Any]:
    rollout = msgspec.structs.asdict(done.rollout)
    samples = [_sample(trained.get(sample.sample_id, sample)) for sample in rollout.pop("samples")]
    messages = msgspec.json.decode(done.messages)
    return {"step": step, "worker": done.worker, **rollout, "messages": messages, "samples": samples}


def _sample(sample: Sample) -> dict[str, Any]:
    """Streams as lists; log-probabilities of single precision are exact in JSON. No advantages: it did not train."""
    return {
        "sample_id": sample.sample_id,
        "temperature": sample.temperature,
        "token_ids": sample.token_ids.numpy().tolist(),
        "mask": sample.mask.numpy().astype(int).tolist(),
        "versions": version_runs(sample.versions.numpy()),
        "logprobs": sample.logprobs.numpy().tolist(),
        "advantages": None if sample.advantages is None else sample.advantages.numpy().tolist(),
        "ref_logprobs": None if sample.ref_logprobs is None else sample.ref_logprobs.numpy().tolist(),
    }


def version_runs(versions: np.ndarray) -> list[tuple[str, int, int]]:
    """Runs (`lineage.step`, start, end) of equal versions in i8[n]; tokens that were not sampled are in none."""
    edges = np.flatnonzero(np.diff(versions)) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(versions)]
    return [(str(PolicyVersion.unpack(versions[start])), start, end)
            for start, end in zip(starts, ends, strict=True)
            if start < end and versions[start] != NOT_SAMPLED]  # fmt: skip
