"""Where everything of a run lies. The layout is a contract: people and scripts rely on it."""

from dataclasses import dataclass
from pathlib import Path

SWEEP = "sweep.json"
"""In the folder of a sweep, beside the run directories of its points."""


@dataclass(frozen=True)
class RunPaths:
    """The files of one run directory."""

    root: Path

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that the run is a point of, if it is one."""
        folder = self.root.parent
        return folder.name if (folder / SWEEP).is_file() else None

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def forks(self) -> Path:
        return self.root / "forks.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def live(self) -> Path:
        """What was changed while the run worked."""
        return self.root / "live.json"

    @property
    def control(self) -> Path:
        return self.rendezvous / "control"

    @property
    def rendezvous(self) -> Path:
        return self.root / "rendezvous"

    @property
    def startup(self) -> Path:
        """How long the newest attempt took to its first step."""
        return self.rendezvous / "startup.json"

    @property
    def exits(self) -> Path:
        return self.rendezvous / "exits"

    @property
    def acks(self) -> Path:
        return self.rendezvous / "acks"

    def host_copy(self, process: str) -> Path:
        """Links to an engine's copy of the weights in the memory of its node."""
        return self.rendezvous / "host_copies" / process

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def batches(self) -> Path:
        return self.rollouts / "batches"

    @property
    def journal(self) -> Path:
        return self.rollouts / "journal"

    @property
    def job(self) -> Path:
        """Ids of the newest attempt's Slurm jobs."""
        return self.root / "job.json"

    @property
    def slurm(self) -> Path:
        """What submitit keeps of the run's jobs: scripts, pickled tasks and their results, the latter by step."""
        return self.root / "slurm"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def bench_table(self) -> Path:
        """What a bench of engines shows at its end."""
        return self.root / "bench.txt"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def weights_version(self, version: str) -> Path:
        """Directory of one weight version; `version` is `lineage.step`."""
        return self.weights / f"v{version}"

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt_{attempt}"
