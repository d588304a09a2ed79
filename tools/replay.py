"""Run one optimiser step of a run again and compare: `python -m tools.replay RUN --step N`.

Starts the trainer alone, on this machine, from the newest checkpoint before the step (the base model where there is
none), trains the recorded batches up to it, and says whether loss and gradient norm are the recorded ones bit by bit.
They are on the same kind of hardware, on a GPU as far as its kernels are deterministic. A replay lies in RUN/replay/.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from prime_hpc.cluster.gpus import count_gpus
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.recovery import FailurePolicy
from prime_hpc.config.run import RunConfig
from prime_hpc.config.sections import LauncherConfig
from prime_hpc.config.trainer import ProfileConfig, ReplayConfig
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.launchers.registry import launch_plan
from prime_hpc.observe.monitor import read_metrics
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.run_plan import load, read_forks
from prime_hpc.transport.checkpoints import newest_first, read_manifest

COMPARED = ("loss", "optim/grad_norm")


def start_of(run: Path, step: int) -> RunStart:
    """The replay of a step, ready to be launched."""
    paths = RunPaths(run)
    forks = read_forks(paths.forks)
    before = [path for path in newest_first(paths.checkpoints, forks) if read_manifest(path).step < step]
    config = _config(load(paths.plan).typed_config(), paths, step)
    attempt = Attempt(checkpoint=before[0] if before else None, forks=forks)
    run_dir = Path(config.run.output_dir) / str(config.run.name)
    return RunStart(config, build_plan(config, run_dir, attempt, count_gpus()), [])


def _config(config: RunConfig, paths: RunPaths, step: int) -> RunConfig:
    section = replace(config.run, output_dir=str(paths.root / "replay"), name=f"step_{step}-{time.time_ns()}")
    replay = ReplayConfig(rollouts=str(paths.rollouts), until=step)
    trainer = replace(config.trainer, replay=replay, profile=ProfileConfig())
    checkpoint = replace(config.checkpoint, every=0)
    recovery = replace(config.recovery, trainer=FailurePolicy(on_failure="stop"))
    return replace(config, mode="replay", run=section, trainer=trainer, checkpoint=checkpoint, recovery=recovery,
                   guard={}, launcher=LauncherConfig())  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    options = parser.parse_args()
    start = start_of(options.run.absolute(), options.step)
    code = launch_plan(start)
    if code:
        sys.exit(code)
    rows = [read_metrics(root / "metrics.jsonl")[options.step] for root in (options.run, start.paths.root)]
    differing = 0
    for name in COMPARED:
        recorded, again = (row[name] for row in rows)
        differing += recorded != again
        print(f"{name}: recorded {recorded!r}, again {again!r}: {'equal' if recorded == again else 'DIFFERENT'}")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
