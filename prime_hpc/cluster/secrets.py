"""Secrets of a run: 0600 files under the user's own directory, never in the plan, argv, environment or logs."""

import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import zmq


@dataclass(frozen=True)
class RunSecrets:
    """`token` opens the engines' routes; the CURVE keys encrypt and guard the ZMQ sockets of the orchestrator."""

    token: str
    curve_public: bytes
    curve_secret: bytes


def secrets_dir(run_dir: Path) -> Path:
    """Folder of a run's secrets: `$PRIME_HPC_HOME` (default `~/.prime_hpc`) `/secrets/<digest of the run's path>`."""
    home = Path(os.environ.get("PRIME_HPC_HOME", Path.home() / ".prime_hpc"))
    return home / "secrets" / hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:32]


def create(run_dir: Path, token: str | None = None) -> RunSecrets:
    """Make new secrets for an attempt, replacing older ones; `token` is one that others know already."""
    directory = secrets_dir(run_dir)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    public, secret = zmq.curve_keypair()
    made = RunSecrets(token or secrets.token_urlsafe(32), public, secret)
    for name, value in (("token", made.token.encode()), ("curve_public", public), ("curve_secret", secret)):
        handle = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(value)
    return made


def token_file(run_dir: Path) -> Path:
    """Where the token of a run lies while its processes need it."""
    return secrets_dir(run_dir) / "token"


def load(run_dir: Path) -> RunSecrets:
    """The secrets that the launcher made for this attempt."""
    directory = secrets_dir(run_dir)
    return RunSecrets(
        token=token_file(run_dir).read_text(),
        curve_public=(directory / "curve_public").read_bytes(),
        curve_secret=(directory / "curve_secret").read_bytes(),
    )


def remove(run_dir: Path) -> None:
    """Forget a run's secrets once no process needs them."""
    shutil.rmtree(secrets_dir(run_dir), ignore_errors=True)
