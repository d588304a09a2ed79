"""Profiles of a few steps: torch's trace of every operation, and what was in a GPU's memory."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from prime_hpc.cluster.role import Role
from prime_hpc.trainer.distributed import World


class StepProfiler:
    """Records `trainer.profile.steps` steps of this rank, if it is chosen, and does nothing at any other."""

    def __init__(self, role: Role, world: World):
        self._role, self._world = role, world
        self._config = config = role.config.trainer.profile
        chosen = config.ranks is None or world.rank in config.ranks
        self._steps = range(config.start, config.start + config.steps) if chosen else range(0)
        self._trace: profile | None = None
        self._first = self._last = 0

    @property
    def _on_gpu(self) -> bool:
        return self._world.device.type == "cuda"

    def begin(self, step: int) -> None:
        """Before `step`, once its batch is there."""
        if step not in self._steps:
            return
        self._last = step
        if self._trace is None:
            self._first = step
            self._start()

    def end(self, step: int) -> None:
        """After all that belongs to `step`."""
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write what was recorded so far."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        if self._on_gpu:
            torch.cuda.synchronize(self._world.device)
        trace.stop()
        folder = self._role.paths.profile / f"steps_{self._first}-{self._last}"
        folder.mkdir(parents=True, exist_ok=True)
        name = self._role.process.name
        self._write(folder / f"{name}.trace.json.gz", lambda path: trace.export_chrome_trace(str(path)))
        if self._config.memory and self._on_gpu:
            self._write(folder / f"{name}.memory.pickle", lambda path: torch.cuda.memory._dump_snapshot(str(path)))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._role.log.info("profile of steps %d to %d: %s", self._first, self._last, folder)

    def _start(self) -> None:
        if self._config.memory and self._on_gpu:
            torch.cuda.memory._record_memory_history()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._trace = profile(activities=activities, record_shapes=True, profile_memory=self._config.memory)
        self._trace.start()

    def _write(self, path: Path, save: Callable[[Path], object]) -> None:
        self._role.patience.write(path.name, lambda: save(path))
