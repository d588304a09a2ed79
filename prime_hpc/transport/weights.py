"""Weights on the shared filesystem: `weights/vL.S/` holds safetensors in Hugging Face layout and a manifest; of
adapters, a folder for each in the layout of PEFT.

A version directory is written under a temporary name and renamed once its manifest lies in it, so that a directory
with the final name is complete. Readers check the digests before a single tensor is used.
"""

import os
import shutil
from pathlib import Path

import msgspec
from blake3 import blake3

from prime_hpc.cluster.files import list_fresh, write_atomic
from prime_hpc.errors import CorruptData, SchemaMismatch
from prime_hpc.transport.messages import PolicyVersion

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1


class FileEntry(msgspec.Struct, kw_only=True):
    """Size in bytes and blake3 digest (hex) of one safetensors file."""

    bytes: int
    digest: str


class WeightsManifest(msgspec.Struct, kw_only=True):
    """What a version directory holds. `digest` covers the digests of all files, in order of name."""

    schema: int = MANIFEST_SCHEMA
    version: str
    dtype: str
    files: dict[str, FileEntry]
    digest: str


def digest_file(path: Path) -> str:
    """blake3 of a file, hex."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def seal(directory: Path, version: PolicyVersion, dtype: str) -> WeightsManifest:
    """Write the manifest over the safetensors files of `directory` (flushed to disk)."""
    files = {str(p.relative_to(directory)): FileEntry(bytes=p.stat().st_size, digest=digest_file(p))
             for p in _tensors(directory)}  # fmt: skip
    manifest = WeightsManifest(version=str(version), dtype=dtype, files=files, digest=_combine(files))
    write_atomic(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


def publish(temporary: Path, final: Path) -> None:
    """Give a sealed directory its final name. A leftover of the same name from an earlier attempt is replaced."""
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)


def verify(directory: Path) -> WeightsManifest:
    """Check every file of a version directory against its manifest.

    Raises:
        CorruptData: a file is missing, cut or changed, or the manifest contradicts itself; the name is in the text.
        SchemaMismatch: the manifest is of another schema version.
    """
    try:
        raw = (directory / MANIFEST).read_bytes()
        if msgspec.json.decode(raw, type=dict).get("schema") != MANIFEST_SCHEMA:
            raise SchemaMismatch(f"{directory / MANIFEST} is not of weights schema {MANIFEST_SCHEMA}")
        manifest = msgspec.json.decode(raw, type=WeightsManifest)
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise CorruptData(f"{directory} has no readable manifest: {error}") from error
    for name, entry in manifest.files.items():
        path = directory / name
        size = path.stat().st_size if path.exists() else None
        if size != entry.bytes:
            raise CorruptData(f"{path} has {size} bytes, its manifest says {entry.bytes}: the file is missing or cut")
        if digest_file(path) != entry.digest:
            raise CorruptData(f"{path} does not match its digest: the file was changed or damaged")
    if manifest.digest != _combine(manifest.files):
        raise CorruptData(f"{directory / MANIFEST} contradicts itself: its digest is not that of its list of files")
    return manifest


def published_versions(weights: Path) -> list[PolicyVersion]:
    """Complete versions under `weights/`, oldest first."""
    return sorted(PolicyVersion.parse(name[1:]) for name in list_fresh(weights) if name.startswith("v"))


def _tensors(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def _combine(files: dict[str, FileEntry]) -> str:
    return blake3("".join(files[name].digest for name in sorted(files)).encode()).hexdigest()
