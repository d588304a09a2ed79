"""When a job has to stop: Slurm's own end time, less what a step and a save take by the run's own measurements."""

import time
from dataclasses import dataclass

import numpy as np

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.launchers.slurm.queue import ENDS, moment
from prime_hpc.observe.monitor import read_metrics

QUANTILE = 0.95
MARGIN_S = 10.0
"""For the processes to leave, and for what Slurm's clock may differ from this one."""
RECENT_STEPS = 200


@dataclass(frozen=True)
class Needs:
    """Seconds of a step and of a save, the 95th percentile of the latest ones; zeros before the first."""

    step_s: float
    save_s: float

    @classmethod
    def measure(cls, paths: RunPaths) -> "Needs":
        rows = list(read_metrics(paths.metrics).values())[-RECENT_STEPS:]
        return cls(_quantile(rows, "time/step"), _quantile(rows, "time/save"))

    @property
    def total_s(self) -> float:
        """What must be left before the end for one more step and the save after it."""
        return self.step_s + self.save_s + MARGIN_S


class Deadline:
    """Tells when the run has to be drained so that it can still save."""

    ASK_S = 30.0

    def __init__(self, paths: RunPaths, job_id: str):
        self._paths, self._job_id = paths, job_id
        self._asked = -self.ASK_S
        self._drain_at: float | None = None
        self._first_step, self._reached = _newest_step(paths), False

    def reached(self) -> str | None:
        """Why the run should be drained now, or None."""
        if time.monotonic() - self._asked > self.ASK_S:
            self._asked = time.monotonic()
            end, needs = moment(self._job_id, ENDS), Needs.measure(self._paths)
            self._drain_at = end - needs.total_s - needs.step_s - self.ASK_S if end else None
        if self._drain_at and time.time() > self._drain_at:
            self._reached = True
            return "the job's time limit is near"
        return None

    def fruitless(self) -> str | None:
        """Why another job of the same length would not bring the run on; None where it may."""
        if self._reached and _newest_step(self._paths) == self._first_step:
            return "the time limit came before the first step, and would again: ask for more time (cluster.time)"
        return None

    def too_short(self) -> str | None:
        """Why the job need not start: not one step and one save fit into it; None where they do."""
        end, needs = moment(self._job_id, ENDS), Needs.measure(self._paths)
        left = end - time.time() if end else float("inf")
        if left < needs.total_s:
            return (f"{left:.0f} s are left of the job, but a step takes {needs.step_s:.0f} s and a save "
                    f"{needs.save_s:.0f} s: ask for more time (cluster.time)")  # fmt: skip
        return None


def _newest_step(paths: RunPaths) -> int:
    return max(read_metrics(paths.metrics), default=0)


def _quantile(rows: list[dict], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(np.quantile(values, QUANTILE)) if values else 0.0
