"""Whose SIGTERM is it? The supervisor marks each unit that it ends; one that comes to another unit was Slurm's."""

from prime_hpc.cluster.files import list_fresh
from prime_hpc.cluster.paths import RunPaths

PREFIX = "stopping."


class StoppingMarks:
    """The marks of a run: empty files in `rendezvous/`, one for each unit that is being ended."""

    def __init__(self, paths: RunPaths):
        self._folder = paths.rendezvous

    def set(self, unit: str) -> None:
        """From now on a SIGTERM to a process of `unit` is the supervisor's."""
        (self._folder / f"{PREFIX}{unit}").touch()

    def lift(self, unit: str) -> None:
        """The unit starts again."""
        (self._folder / f"{PREFIX}{unit}").unlink(missing_ok=True)

    def stands(self, unit: str) -> bool:
        """Whether the supervisor is ending `unit`."""
        return f"{PREFIX}{unit}" in list_fresh(self._folder)

    def clear(self) -> None:
        """Forget what an earlier attempt was ending."""
        for name in list_fresh(self._folder):
            if name.startswith(PREFIX):
                (self._folder / name).unlink()
