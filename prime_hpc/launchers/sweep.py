"""A sweep: the runs of all its points in one folder, with the slots in which Slurm runs them."""

import datetime
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.gpus import count_gpus
from prime_hpc.cluster.paths import SWEEP
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import parse
from prime_hpc.config.sections import RunSection
from prime_hpc.config.slurm_checks import parse_time
from prime_hpc.errors import ConfigProblem, ConfigurationError
from prime_hpc.launchers.verdict import EXIT_INTERRUPTED
from prime_hpc.plan.build import Attempt, build_plan

NAME = re.compile(r"[^A-Za-z0-9_.+-]+")
LONGEST_NAME = 100
"""Of a point: file systems take 255 bytes, and Slurm shows few of them."""


@dataclass(frozen=True)
class Point:
    """One run: its name, all its overrides, and those of them in which points differ."""

    name: str
    overrides: list[str]
    varied: list[str]


@dataclass
class Sweep:
    """The points of a sweep and the folder that holds their run directories."""

    folder: Path
    points: list[Point]
    failed: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, job_overrides: Sequence[Sequence[str]], name: str | None, config: DictConfig, max_parallel: int
    ) -> "Sweep":
        """Name the points and deal them to `max_parallel` slots; without a bound they have none.

        Jobs of a slot have one name and wait for each other (`--dependency=singleton`), a job that Slurm starts again
        and a successor included, so that never more than `max_parallel` points run.
        """
        sweep = name or f"sweep-{datetime.datetime.now():%m%d-%H%M%S}"
        folder = Path(OmegaConf.select(config, "run.output_dir") or RunSection().output_dir).absolute() / sweep
        common = set.intersection(*(set(overrides) for overrides in job_overrides))
        points = []
        for i, overrides in enumerate(job_overrides):
            varied = [o.lstrip("+") for o in overrides if o not in common]
            place = [f"++run.output_dir='{folder}'", f"++run.name={_name(i, varied)}"]
            slot = [f"++launcher.slot={sweep}.slot{i % max_parallel}"] if max_parallel else []
            points.append(Point(_name(i, varied), [*overrides, *place, *slot], varied))
        return cls(folder, points)

    def check_budget(self, configs: Sequence[DictConfig], gpu_hours: float | None) -> None:
        """Compare what the points could use at most with the budget.

        Raises:
            ConfigurationError: they could use more, or have no time limit.
        """
        if gpu_hours is None:
            return
        total = sum(_most_gpu_hours(_parse(config), self.folder) for config in configs)
        if total > gpu_hours:
            raise ConfigurationError([ConfigProblem("hydra.launcher.gpu_hours", gpu_hours,
                f"at least {total:.4g}: what {len(configs)} points may use within cluster.time")])  # fmt: skip

    def write(self) -> None:
        """Take down which points there are, for the table of results."""
        write_json(self.folder / SWEEP, {"points": [{"name": p.name, "overrides": p.varied} for p in self.points]})

    @contextmanager
    def point(self, point: Point) -> Iterator[None]:
        """A point that fails is remembered and does not end the sweep; Ctrl-C does."""
        print(f"\n=== {point.name}: {' '.join(point.varied)}", flush=True)
        try:
            yield
        except SystemExit as ended:
            if ended.code == EXIT_INTERRUPTED:
                raise
            self.failed.append(point.name)

    def conclude(self) -> None:
        """Say where the results come.

        Raises:
            SystemExit: with code 1 where points failed.
        """
        print(f"\n{len(self.points)} points in {self.folder}; python -m prime_hpc.sweep {self.folder} compares them")
        if self.failed:
            print(
                f"{len(self.failed)} of them failed to start or to end well: {', '.join(self.failed)}", file=sys.stderr
            )
            sys.exit(1)


def _name(index: int, varied: list[str]) -> str:
    """`2_seed-3_lr-1e-5`: the number of a point, then the last word of each key with its value."""
    words = []
    for override in varied:
        key, _, value = override.partition("=")
        words.append(NAME.sub("-", f"{key.rpartition('.')[2]}={value}").strip("-"))
    return "_".join([str(index), *words])[:LONGEST_NAME]


def _parse(config: DictConfig) -> RunConfig:
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    return parse({key: value for key, value in values.items() if key != "hydra"})


def _most_gpu_hours(config: RunConfig, folder: Path) -> float:
    """GPUs that a point holds, for as long as its job may take."""
    seconds = parse_time(config.cluster.time or "")
    if not seconds:
        expected = "a time limit, since hydra.launcher.gpu_hours is counted by it"
        raise ConfigurationError([ConfigProblem("cluster.time", config.cluster.time, expected)])
    gpus = 0 if config.launcher.on_slurm else count_gpus()
    return build_plan(config, folder, Attempt(), gpus).held_gpus * seconds / 3600
