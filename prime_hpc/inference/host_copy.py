"""The weights of one engine in the memory of its node, as files in Hugging Face layout, brought forward by deltas.

The files are anonymous memory of the engine's process, which its workers open under a folder of links: they go when the
process does, however it ends.
"""

import mmap
import os
import shutil
from pathlib import Path

import numpy as np

from prime_hpc.errors import CorruptData
from prime_hpc.transport import delta
from prime_hpc.transport.weights import (
    DELTA_SUFFIX,
    WeightsManifest,
    read_manifest,
    verify,
    verify_file,
    write_manifest,
)


class HostCopy:
    """The copy behind `folder`, which is made anew; empty until the first version is brought."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, tuple[int, mmap.mmap]] = {}
        self.version: str | None = None
        """The version that the files hold."""

    def bring(self, directory: Path) -> Path:
        """Turn the copy into the version of `directory` and return its folder, a whole version with its manifest.

        A copy from which no deltas lead there, or that turns out wrong, starts from the newest whole version before it.

        Raises:
            CorruptData: files on the shared filesystem are missing or damaged.
        """
        held = self.version
        try:
            self._follow(_chain(directory, held))
        except CorruptData:
            if held is None:
                raise
            self._follow(_chain(directory, None))
        return self._folder

    def _follow(self, chain: list[Path]) -> None:
        """Take every step of a chain, whose first is a whole version unless it continues the copy."""
        before, self.version = self.version, None
        for directory in chain:
            manifest = read_manifest(directory)
            if manifest.delta and manifest.delta.base == before:
                self._patch(directory, manifest)
            else:
                self._start(directory, manifest)
            before = manifest.version
        self._seal(manifest)
        self.version = manifest.version

    def _start(self, directory: Path, manifest: WeightsManifest) -> None:
        for name, entry in manifest.files.items():
            source = directory / name
            verify_file(source, entry)
            memory = self._memory(name, entry.bytes)
            with source.open("rb") as file:
                file.readinto(memory)

    def _patch(self, directory: Path, manifest: WeightsManifest) -> None:
        for name, entry in manifest.delta.files.items():
            path = directory / f"{name}{DELTA_SUFFIX}"
            verify_file(path, entry)
            delta.apply(np.frombuffer(self._memory(name, manifest.files[name].bytes), np.uint8), path.read_bytes())

    def _seal(self, manifest: WeightsManifest) -> None:
        """A folder that holds exactly the files of `manifest`, checked against it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for name in manifest.files:
            descriptor, _ = self._files[name]
            (self._folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        whole = WeightsManifest(version=manifest.version, dtype=manifest.dtype, files=manifest.files)
        write_manifest(self._folder, whole)
        verify(self._folder)

    def _memory(self, name: str, size: int) -> mmap.mmap:
        """The memory of a file, made anew where it has another size."""
        if name in self._files and len(self._files[name][1]) == size:
            return self._files[name][1]
        if name in self._files:
            os.close(self._files.pop(name)[0])
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, size)
        self._files[name] = descriptor, mmap.mmap(descriptor, size)
        return self._files[name][1]


def _chain(directory: Path, held: str | None) -> list[Path]:
    """Version directories to go through, oldest first: on from `held` by deltas, else from the newest whole version.

    Raises:
        CorruptData: neither is there any more.
    """
    steps, whole = [], None
    while True:
        manifest = read_manifest(directory)
        steps.append(directory)
        if manifest.delta and manifest.delta.base == held:
            return steps[::-1]
        if manifest.whole:
            whole = whole or len(steps)
        if whole and (held is None or manifest.delta is None):
            return steps[:whole][::-1]
        if manifest.delta is None:
            raise CorruptData(f"{steps[0]} goes back to {directory}, which is not whole: no whole version leads to it")
        directory = directory.with_name(f"v{manifest.delta.base}")
