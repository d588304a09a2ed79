"""Lustre: large files over all servers, where a folder lies on such a filesystem."""

import shutil
import subprocess
from pathlib import Path

STRIPE_BYTES = "16M"
"""Contiguous bytes on one server: files of weights and shards are far larger, writes come in such sizes."""


def spread(folder: Path) -> bool:
    """Have files that are made in `folder` from now on lie over all servers; whether it is on Lustre at all."""
    if shutil.which("lfs") is None:
        return False
    command = ["lfs", "setstripe", "--stripe-count", "-1", "--stripe-size", STRIPE_BYTES, str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0
