"""The secrets of a run, as its launcher makes and removes them."""

from pathlib import Path

from prime_hpc.cluster import secrets
from prime_hpc.config.fleet_checks import KEY
from prime_hpc.config.run import RunConfig
from prime_hpc.errors import ConfigProblem, ConfigurationError


def provide(config: RunConfig, run_dir: Path) -> None:
    """Make the secrets of an attempt. A fleet keeps its token, and who attaches to one takes it over: then whatever
    asks an engine, here or there, shows the same.

    Raises:
        ConfigurationError: the fleet that the run attaches to has none.
    """
    secrets.create(run_dir, _token(config, run_dir))


def discard(config: RunConfig, run_dir: Path) -> None:
    """Remove the secrets of a run that has ended; those of a fleet outlive it, for its next attempt."""
    if config.mode != "serve":
        secrets.remove(run_dir)


def _token(config: RunConfig, run_dir: Path) -> str | None:
    attach, kept = config.inference.attach, secrets.token_file(run_dir)
    if not attach.on:
        return kept.read_text() if config.mode == "serve" and kept.exists() else None
    path = secrets.token_file(Path(attach.run)) if attach.run is not None else Path(attach.token_file or "")
    if not path.is_file():
        raise ConfigurationError([ConfigProblem(f"{KEY}.{'run' if attach.run else 'token_file'}", str(path),
                                                "the token of a fleet that was started by this user")])  # fmt: skip
    return path.read_text().strip()
