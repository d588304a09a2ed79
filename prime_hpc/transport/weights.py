"""Policy versions on the shared filesystem: `weights/vL.S/` holds a manifest that says how to come by the weights.

They lie there whole, as safetensors in Hugging Face layout or, of adapters, as a folder for each in that of PEFT; or as
what changed since another version; or the trainer offers to stream them. A directory is written under a temporary name
and renamed once its manifest lies in it. Readers check digests before a single tensor is used.
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
MANIFEST_SCHEMA = 2
RECEIVERS = "receivers.json"
DELTA_SUFFIX = ".delta"
PARALLEL_BYTES = 16 << 20


class FileEntry(msgspec.Struct, kw_only=True):
    """Size in bytes and blake3 digest (hex) of one file."""

    bytes: int
    digest: str


class Delta(msgspec.Struct, kw_only=True):
    """The files of this version can be made from those of version `base`, each by the file `<name>.delta`."""

    base: str
    files: dict[str, FileEntry]


class TensorEntry(msgspec.Struct, array_like=True):
    """A tensor in Hugging Face layout; `dtype` by torch's name without the package."""

    name: str
    dtype: str
    shape: list[int]


class Stream(msgspec.Struct, kw_only=True):
    """The trainer waits to send this version, bucket after bucket, to the engines named in `receivers.json`.

    `senders` is where each engine finds its sender (`host:port` of a store), `backend` what carries the buckets. An
    engine has `ready_s` seconds to stop sampling; later, whoever takes part gives up when nothing moves for `stall_s`.
    """

    backend: str
    senders: dict[str, str]
    ready_s: float
    stall_s: float
    buckets: list[list[TensorEntry]]


class Receiver(msgspec.Struct, kw_only=True):
    """An engine that takes part in a stream: the name of its link with the sender, and its worker ranks."""

    link: str
    workers: int


class Canary(msgspec.Struct, kw_only=True):
    """A token sequence and the trainer's log-probability of every token but the first under this version."""

    token_ids: list[int]
    logprobs: list[float]


class WeightsManifest(msgspec.Struct, kw_only=True):
    """How to come by a version. `files` are those of the whole version, which lie in the directory if `whole`.

    `digest` covers the digests of all files, in order of name; `streamed` the checksums of all tensors that were
    streamed. A version that was only streamed has no files.
    """

    schema: int = MANIFEST_SCHEMA
    version: str
    dtype: str
    files: dict[str, FileEntry] = {}
    digest: str = ""
    whole: bool = True
    delta: Delta | None = None
    stream: Stream | None = None
    streamed: str = ""
    canary: Canary | None = None

    @property
    def in_files(self) -> bool:
        """Whether files lead to this version."""
        return self.whole or self.delta is not None


def digest_file(path: Path) -> str:
    """blake3 of a file, hex. Threads are of use for large files only, and their pool stays."""
    threads = blake3.AUTO if path.stat().st_size > PARALLEL_BYTES else 1
    return blake3(max_threads=threads).update_mmap(path).hexdigest()


def entry_of(path: Path) -> FileEntry:
    return FileEntry(bytes=path.stat().st_size, digest=digest_file(path))


def seal(directory: Path, version: PolicyVersion, dtype: str) -> WeightsManifest:
    """Write the manifest over the safetensors files of `directory` and its folders, a whole version."""
    files = {str(path.relative_to(directory)): entry_of(path) for path in sorted(directory.rglob("*.safetensors"))}
    return write_manifest(directory, WeightsManifest(version=str(version), dtype=dtype, files=files))


def write_manifest(directory: Path, manifest: WeightsManifest) -> WeightsManifest:
    """Fill in the digest and write the manifest, flushed to disk."""
    manifest.digest = combine(manifest.files)
    write_atomic(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


def publish(temporary: Path, final: Path) -> None:
    """Give a sealed directory its final name. A leftover of the same name from an earlier attempt is replaced."""
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)


def read_manifest(directory: Path) -> WeightsManifest:
    """The manifest of a version.

    Raises:
        CorruptData: it is missing or unreadable, or contradicts itself.
        SchemaMismatch: it is of another schema version.
    """
    try:
        raw = (directory / MANIFEST).read_bytes()
        if msgspec.json.decode(raw, type=dict).get("schema") != MANIFEST_SCHEMA:
            raise SchemaMismatch(f"{directory / MANIFEST} is not of weights schema {MANIFEST_SCHEMA}")
        manifest = msgspec.json.decode(raw, type=WeightsManifest)
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise CorruptData(f"{directory} has no readable manifest: {error}") from error
    if manifest.digest != combine(manifest.files):
        raise CorruptData(f"{directory / MANIFEST} contradicts itself: its digest is not that of its list of files")
    return manifest


def verify(directory: Path) -> WeightsManifest:
    """Check every file of a whole version against its manifest.

    Raises:
        CorruptData: a file is missing, cut or changed, or the manifest contradicts itself; the name is in the text.
        SchemaMismatch: the manifest is of another schema version.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        verify_file(directory / name, entry)
    return manifest


def verify_file(path: Path, entry: FileEntry) -> None:
    """Compare a file with its entry.

    Raises:
        CorruptData: it is missing, cut or changed.
    """
    size = path.stat().st_size if path.exists() else None
    if size != entry.bytes:
        raise CorruptData(f"{path} has {size} bytes, its manifest says {entry.bytes}: the file is missing or cut")
    if digest_file(path) != entry.digest:
        raise CorruptData(f"{path} does not match its digest: the file was changed or damaged")


def published_versions(weights: Path) -> list[PolicyVersion]:
    """Complete versions under `weights/`, oldest first."""
    return sorted(PolicyVersion.parse(name[1:]) for name in list_fresh(weights) if name.startswith("v"))


def combine(files: dict[str, FileEntry]) -> str:
    return blake3("".join(files[name].digest for name in sorted(files)).encode()).hexdigest()
