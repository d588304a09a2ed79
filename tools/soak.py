"""A run whose processes are killed at random, beside one that is left alone: `python -m tools.soak --out FOLDER`.

Exit code 1 where a promise was broken or the reward curves differ.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from prime_hpc.models.tiny import make_tiny_model
from prime_hpc.observe.monitor import read_metrics
from tools.endurance import UNCHANGED, account, broken_promises, processes
from tools.forked import Process

POLL_S = 0.2
WINDOWS = 5
"""Parts of the run over which rewards are compared."""
TOLERANCE = 5.0
"""Largest difference of two windows, in standard errors of it."""
OVERRIDES = (
    *UNCHANGED, "trainer.ranks=1", "env.workers=2", "inference.replicas=2", "checkpoint.every=5",
    "inference.engine=tests.fake_engine",
)  # fmt: skip


def settings(steps: int) -> list[str]:
    """Of a run on the fake engine, whose skill grows from 0.2 to 0.8."""
    skill = f"inference.engine_args={{skill0: 0.2, skill_per_version: {0.6 / steps}, token_s: 0.002}}"
    return [*OVERRIDES, skill, f"max_steps={steps}"]


def start(out: Path, name: str, model: Path, steps: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "tools.forked", "+experiment=reverse_text_cpu", *settings(steps),
               f"run.name={name}", f"model.path={model}", f"run.output_dir={out}"]  # fmt: skip
    return subprocess.Popen(command)


def kill_at_random(
    run: Process, root: Path, steps: int, kills: int, rng: random.Random, pause_s: float = 2.0
) -> Counter[str]:
    """Kill `kills` times a process of the run, at steps drawn in advance and after pauses of up to `pause_s`; returns
    how often each one was.

    Raises:
        RuntimeError: the run ended first.
    """
    due = sorted(rng.randrange(1, steps - 2) for _ in range(kills))
    killed: Counter[str] = Counter()
    while due:
        time.sleep(rng.uniform(POLL_S, pause_s))
        if (code := run.poll()) is not None:
            raise RuntimeError(f"the run ended with {code} after {killed.total()} of {kills} kills")
        if max(read_metrics(root / "metrics.jsonl"), default=0) < due[0]:
            continue
        name, pid = rng.choice([(name, pid) for name, pid in processes(root) if os.getsid(pid) == pid])
        os.kill(pid, signal.SIGKILL)
        killed[name] += 1
        due.pop(0)
    return killed


def compare(left: Path, right: Path) -> list[tuple[float, float, float]]:
    """Mean rewards of two runs in each window of their steps, and their difference in standard errors."""
    curves = [[row["train/all/reward"] for row in read_metrics(root / "metrics.jsonl").values()]
              for root in (left, right)]  # fmt: skip
    parts = zip(*(np.array_split(np.array(curve), WINDOWS) for curve in curves), strict=True)
    means = [(a.mean(), b.mean(), np.sqrt(a.var() / len(a) + b.var() / len(b))) for a, b in parts]
    return [(float(a), float(b), float((b - a) / error)) for a, b, error in means]


def storm(out: Path, model: Path, steps: int, kills: int, seed: int) -> Counter[str]:
    """Make the run `out/stormy`; returns kills by process.

    Raises:
        RuntimeError: it did not end well.
    """
    stormy = start(out, "stormy", model, steps)
    killed = kill_at_random(stormy, out / "stormy", steps, kills, random.Random(seed))
    if stormy.wait():
        raise RuntimeError(f"the run failed after {killed.total()} kills")
    return killed


def soak(
    out: Path, model: Path, steps: int, kills: int, seed: int
) -> tuple[Counter[str], list[tuple[float, float, float]]]:
    """Make the runs `out/calm`, which is left alone, and `out/stormy`; returns kills by process and rewards of both.

    Raises:
        RuntimeError: a run did not end well.
    """
    if start(out, "calm", model, steps).wait():
        raise RuntimeError("the run that was left alone failed")
    return storm(out, model, steps, kills, seed), compare(out / "calm", out / "stormy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    make_tiny_model(out / "model", seed=0, hidden_size=32, layers=2)
    killed, rewards = soak(out, out / "model", arguments.steps, arguments.kills, arguments.seed)
    broken = broken_promises(out / "stormy", arguments.steps)
    print(json.dumps(killed), *("rewards {:.3f} and {:.3f}, {:+.1f} standard errors".format(*r) for r in rewards),
          account(out / "stormy", arguments.steps), *broken, sep="\n")  # fmt: skip
    sys.exit(bool(broken) or any(abs(errors) > TOLERANCE for *_, errors in rewards))


if __name__ == "__main__":
    main()
