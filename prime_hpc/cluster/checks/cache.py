"""Is a model on this node's disks whole? Offline nodes cannot fetch what is missing."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from prime_hpc.cluster.checks.finding import Finding
from prime_hpc.config.model_files import INDEX, has_tokenizer, weight_files


def inspect_model(folder: Path) -> Finding:
    """Configuration, tokenizer and every file of weights are there, none of them cut short."""
    faults = list(_faults(folder))
    words = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
    return Finding("model", not faults, f"{words} in {folder}: run python -m tools.prefetch where there is a network"
                   if faults else f"{folder.name} is whole")  # fmt: skip


def _faults(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield "no config.json"
    if not has_tokenizer(folder):
        yield "no tokenizer"
    files = weight_files(folder)
    if not files:
        yield f"no files in {INDEX}"
    for name in files:
        if not (folder / name).is_file():
            yield f"no {name}"
        elif (found := (folder / name).stat().st_size) != (wanted := whole_size(folder / name)):
            yield f"{name} has {found} of {wanted} bytes"


def whole_size(path: Path) -> int:
    """Bytes that a safetensors file must have by its own header; -1 where the header itself is cut short."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        header = file.read(length) if 0 < length <= path.stat().st_size else b""
    if len(header) < max(length, 1):
        return -1
    tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
    return 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
