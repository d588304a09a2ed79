"""Hydra's launcher of sweeps (`hydra/launcher=prime_hpc`); Hydra looks for plug-ins in this namespace only."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from prime_hpc.errors import ConfigurationError
from prime_hpc.launchers.sweep import Sweep

EXIT_CONFIGURATION = 2


@dataclass
class SweepConfig:
    """Keys under `hydra.launcher`."""

    _target_: str = "hydra_plugins.prime_hpc.SweepLauncher"
    name: str | None = None
    """Folder of the sweep below `run.output_dir`; made from the date when left out."""
    max_parallel: int = 0
    """Points that run at once at most under Slurm; 0 is no bound."""
    gpu_hours: float | None = None
    """Refuse the sweep where its points could use more: GPUs times `cluster.time`, summed up."""


ConfigStore.instance().store(group="hydra/launcher", name="prime_hpc", node=SweepConfig, provider="prime_hpc")


class SweepLauncher(Launcher):
    """Every point is a run of its own: submitted at once under Slurm, one after the other on this machine."""

    def __init__(self, name: str | None, max_parallel: int, gpu_hours: float | None):
        self._name, self._max_parallel, self._gpu_hours = name, max_parallel, gpu_hours

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Launch every point, whatever becomes of the others; exits with 1 where one of them failed."""
        setup_globals()
        sweep = Sweep.of(job_overrides, self._name, self._config, self._max_parallel)
        load = self._context.config_loader.load_sweep_config
        configs = [load(self._config, point.overrides) for point in sweep.points]
        try:
            sweep.check_budget(configs, self._gpu_hours)
        except ConfigurationError as error:
            print(error, file=sys.stderr)
            sys.exit(EXIT_CONFIGURATION)
        sweep.write()
        returns = []
        for i, (point, config) in enumerate(zip(sweep.points, configs, strict=True), initial_job_idx):
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = i
            with sweep.point(point):
                returns.append(run_job(self._task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self._context))
        sweep.conclude()
        return returns
