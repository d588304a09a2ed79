"""What a worker rank does around loading weights, whatever the engine: check before, acknowledge after."""

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prime_hpc.cluster.files import appears, write_atomic
from prime_hpc.errors import CorruptData
from prime_hpc.inference.protocol import WorkerAck
from prime_hpc.transport.weights import Stream, WeightsManifest, verify

Answer = dict[str, Any]
Shapes = dict[str, list[int]]
"""Shapes of tensors by name."""
HEADER_LENGTH_BYTES = 8
LATE_S = 10.0
"""A version that was announced is waited for so long."""


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
    """The manifest of `directory`, which may show late, and every file of which matches it.

    Raises:
        CorruptData: a file does not match, or the directory holds another version or is not there.
    """
    appears(directory, LATE_S)
    manifest = verify(directory)
    if manifest.version != version:
        raise CorruptData(f"{directory} holds version {manifest.version}, not {version}")
    return manifest


def shapes_in(directory: Path, manifest: WeightsManifest) -> Shapes:
    """Shapes of all tensors of a whole version."""
    return {name: shape for file in manifest.files for name, shape in read_shapes(directory / file).items()}


def streamed_shapes(stream: Stream) -> Shapes:
    """Shapes of all tensors that are on offer."""
    return {entry.name: entry.shape for bucket in stream.buckets for entry in bucket}


def check_complete(given: Shapes, model: Path, origin: Path) -> None:
    """Compare the tensors that `origin` gives with those of the checkpoint in `model`, which the engine started from.

    An engine merges tensors (query, key and value, say): one that is missing would leave garbage in its place.

    Raises:
        CorruptData: a tensor is missing or has another shape.
    """
    wanted = required_shapes(model)
    bad = [f"{name} {shape}, got {given.get(name)}" for name, shape in wanted.items() if given.get(name) != shape]
    if bad:
        raise CorruptData(f"{origin} differs from {model} in {len(bad)} tensors, first {'; '.join(bad[:3])}")


def required_shapes(model: Path) -> Shapes:
    """Tensors that every version must hold: those of the model's files but for a head that is the embedding again, and
    for layers past the last one and modules `mtp`, which serve speculative decoding."""
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config") or config
    shapes = {name: shape for path in model.glob("*.safetensors") for name, shape in read_shapes(path).items()}
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    layers = config.get("num_hidden_layers", 0)
    return {name: shape for name, shape in shapes.items() if _layer(name) < layers and not name.startswith("mtp.")}


def _layer(name: str) -> int:
    """Index of the layer that a tensor belongs to; -1 for the others."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def read_shapes(path: Path) -> Shapes:
    """Shapes in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def acknowledge(
    acks: Path, process: str, rank: int, version: str, digest: str, *, begin: float, n_tensors: int
) -> Answer:
    """Write and return the acknowledgement of one rank that loads since `begin` (monotonic seconds)."""
    ack = WorkerAck(version=version, digest=digest, seconds=time.monotonic() - begin, n_tensors=n_tensors,
                    time=time.time())  # fmt: skip
    write_atomic(acks / f"{process}.rank{rank}.json", msgspec.json.encode(ack), durable=False)
    return msgspec.to_builtins(ack)
