"""Batches that another run recorded, behind the interface of the orchestrator's."""

import time
from pathlib import Path

from prime_hpc.algorithms.packing import pack_batch
from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.role import Role
from prime_hpc.observe.monitor import Monitor
from prime_hpc.observe.records import read_batch
from prime_hpc.trainer.distributed import World
from prime_hpc.transport.images import images_of
from prime_hpc.transport.messages import RankBatch, StepReport


class RecordSource:
    """Every rank reads the batch and takes its part; rank 0 logs the reports."""

    def __init__(self, role: Role, world: World):
        self._role, self._world, self._start = role, world, time.monotonic()
        self._rollouts = Path(role.config.trainer.replay.rollouts)
        self._until = role.config.trainer.replay.until
        self._monitor = Monitor(role) if world.first else None

    def receive(self, step: int, report: StepReport | None, checkpointed: int) -> RankBatch:
        """Batch `step` of the recorded run.

        Raises:
            CorruptData: it was not recorded.
        """
        self._log(report)
        manifest, samples, images = read_batch(self._rollouts, step)
        rows = pack_batch(samples, self._world.dp_size, self._role.config)[self._world.dp_rank]
        return RankBatch(step=step, rank=self._world.dp_rank, journal_offset=0, last=step == self._until,
                         micro_batches=rows, sample_ids=manifest.sample_ids, lr=manifest.lr,
                         images=images_of(rows, images))  # fmt: skip

    def finish(self, step: int, report: StepReport | None, checkpointed: int) -> None:
        """Log the last step, write the summary and declare the run complete."""
        self._log(report)
        if self._monitor:
            self._monitor.close()
            write_json(self._role.paths.summary, {"steps": step, "wall_s": time.monotonic() - self._start})
            self._role.mark_complete()

    def _log(self, report: StepReport | None) -> None:
        if self._monitor and report:
            self._monitor.log(report.step, report.metrics)
