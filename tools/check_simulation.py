"""Runs beside what the simulation of one of them foretold: `python -m tools.check_simulation --out FOLDER`.

Runs on an engine without a model that sleeps for every token, under four bounds of load and staleness. From the timings
of the first, the simulation foretells the seconds of a step of the others.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.models.tiny import make_tiny_model
from prime_hpc.observe.advisor import SETTLED, read_timings, setting_of
from prime_hpc.observe.monitor import read_metrics
from prime_hpc.plan.run_plan import load
from prime_hpc.plan.simulation import Setting, Timings, simulate

CASES = {"loaded_little": (16, 0), "loaded_fully": (64, 0), "ahead": (16, 2), "fully_ahead": (64, 2)}
"""Rollouts in flight and bound on staleness."""
OVERRIDES = (
    "launcher=local", "seq_len=64", "orchestrator.batch_size=64", "orchestrator.group_size=4", "trainer.ranks=1",
    "trainer.threads=1", "env.workers=1", "inference.engine=tests.fake_engine", "checkpoint.every=0",
    "orchestrator.drop_zero_advantage=false", "inference.engine_args={skill0: 0.4, skill_per_version: 0, token_s: 0.3}",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=14, help="steps of each run")
    options = parser.parse_args()
    out, source = options.out.resolve(), None
    make_tiny_model(out / "model", seed=0)
    print("| run | in flight, staleness | measured | foretold | error |\n| --- | --- | --- | --- | --- |")
    for name, (inflight, staleness) in CASES.items():
        measured, setting, timings = run(out, name, options.steps, inflight, staleness)
        source = source or timings
        foretold = simulate(setting, source).step_s
        error = foretold / measured - 1
        cells = (name, f"{inflight}, {staleness}", f"{measured:.2f} s", f"{foretold:.2f} s", f"{error:+.0%}")
        print(f"| {' | '.join(cells)} |", flush=True)


def run(out: Path, name: str, steps: int, inflight: int, staleness: int) -> tuple[float, Setting, Timings]:
    """Mean seconds of a settled step of a run, its setting and its timings."""
    command = [sys.executable, "-m", "tools.forked", "+experiment=reverse_text_cpu", *OVERRIDES, f"max_steps={steps}",
               f"model.path={out / 'model'}", f"run.output_dir={out}", f"run.name={name}",
               f"orchestrator.max_inflight={inflight}", f"orchestrator.max_staleness={staleness}"]  # fmt: skip
    with (out / f"{name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)
    paths = RunPaths(out / name)
    rows = [row for row in read_metrics(paths.metrics).values() if "time/step" in row][SETTLED:]
    timings = read_timings(paths, rows)
    if timings is None:
        sys.exit(f"{paths.root} has too few steps to tell anything")
    return float(np.mean([row["time/step"] for row in rows])), setting_of(load(paths.plan).typed_config()), timings


if __name__ == "__main__":
    main()
