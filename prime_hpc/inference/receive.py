"""What a worker rank does around loading weights, whatever the engine: check before, acknowledge after."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prime_hpc.cluster.files import write_atomic
from prime_hpc.errors import CorruptData
from prime_hpc.inference.protocol import WorkerAck
from prime_hpc.transport.weights import WeightsManifest, verify

Answer = dict[str, Any]


def answers_errors(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Turn an exception into `{"error": text, "type": class name}`, for callers that an exception would end."""

    @functools.wraps(method)
    def guarded(*args: Any) -> Answer:
        try:
            return method(*args)
        except Exception as error:
            return {"error": str(error) or repr(error), "type": type(error).__name__}

    return guarded


def check(directory: Path, version: str) -> WeightsManifest:
    """The manifest of `directory`, every file of which matches it.

    Raises:
        CorruptData: a file does not match, or the directory holds another version.
    """
    manifest = verify(directory)
    if manifest.version != version:
        raise CorruptData(f"{directory} holds version {manifest.version}, not {version}")
    return manifest


def acknowledge(
    acks: Path, process: str, rank: int, manifest: WeightsManifest, *, begin: float, n_tensors: int
) -> Answer:
    """Write and return the acknowledgement of one rank that loads since `begin` (monotonic seconds)."""
    ack = WorkerAck(version=manifest.version, digest=manifest.digest, seconds=time.monotonic() - begin,
                    n_tensors=n_tensors, time=time.time())  # fmt: skip
    write_atomic(acks / f"{process}.rank{rank}.json", msgspec.json.encode(ack), durable=False)
    return msgspec.to_builtins(ack)
