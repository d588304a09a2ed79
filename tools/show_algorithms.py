"""Every algorithm in a short run, and what it has to move: `python -m tools.show_algorithms --out FOLDER`.

Tiny models are warmed up by examples, then each algorithm trains one by a vLLM server and a real environment. What it
moves is measured at the begin and at the end of its run. Exit code 1 where a run failed or its signal went astray.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from prime_hpc.algorithms.trajectories import Trajectory
from prime_hpc.observe.monitor import read_metrics
from tools import make_reverse_text, make_warmup

WINDOW = 5
"""Rows that are averaged at either end."""
WORDS = "id: prime_hpc.envs.reverse_text, args: {min_len: 8, max_len: 12"
EVALUATED = ("env.eval.at_start=true", f"env.eval.sources=[{{{WORDS}, seed: 9, num_tasks: 256}}, name: held_out, "
             "sampling: {max_tokens: 14}}]")  # fmt: skip
FOLDER = "FOLDER"
HELD_OUT = ("eval/held_out/reward",)


@dataclass(frozen=True)
class Warmup:
    """A model that has seen examples until it answers a share of those held out, or for some steps."""

    module: str
    arguments: tuple[str, ...]
    stop_at: float | None = None
    steps: int = 400


@dataclass(frozen=True)
class Case:
    """An algorithm, the warm-up it begins with, and metrics that it has to move."""

    algorithm: str
    warmup: str = "words"
    experiment: str = "reverse_text_cpu"
    overrides: tuple[str, ...] = EVALUATED
    signal: tuple[str, ...] = HELD_OUT
    falls: bool = False
    rate: str = "1e-4"
    steps: int = 24

    def arguments(self, out: Path, seed: int) -> list[str]:
        """Of the launch command."""
        return [f"+experiment={self.experiment}", f"algorithm={self.algorithm}", f"seed={seed}",
                f"max_steps={self.steps}", "checkpoint.every=0", f"optimizer.lr={self.rate}",
                "optimizer.warmup_steps=3", f"model.path={out / self.warmup / 'model'}",
                *(override.replace(FOLDER, str(out)) for override in self.overrides)]  # fmt: skip


WARMUPS = {
    "words": Warmup(make_reverse_text.__name__, (), 0.2),
    "teacher": Warmup(make_reverse_text.__name__, (), 0.7),
    "shown": Warmup(make_reverse_text.__name__, ("--shown",), 0.7),
    "names": Warmup(make_warmup.__name__, ("alphabet_sort_cpu",), 0.35),
    "cards": Warmup(make_warmup.__name__, ("kuhn_poker_cpu",), steps=200),
    "sums": Warmup(make_warmup.__name__, ("proposer_solver_cpu",), 0.25),
}
TEACHER = ("algorithm.teacher=teacher", f"frozen={{teacher: {{path: {FOLDER}/teacher/model}}}}")
DEMONSTRATION = ("algorithm.demonstration=answer", "algorithm.role=user", "algorithm.template='{demonstration}'",
                 "inference.vllm.max_model_len=128")  # fmt: skip
CASES = (
    Case("grpo"),
    Case("grpo_std"),
    Case("rloo"),
    Case("max_rl"),
    Case("reinforce_pp"),
    Case("custom", overrides=(*EVALUATED, "algorithm.import_path=tools.show_algorithms.best_of_group")),
    Case("opd", overrides=(*EVALUATED, *TEACHER)),
    Case("sft", overrides=(*EVALUATED, *TEACHER)),
    Case("opsd", warmup="shown", overrides=(*EVALUATED, *DEMONSTRATION)),
    Case("echo", "names", "alphabet_sort_cpu", ("algorithm.echo={user: 0.02}",), ("nll",), falls=True),
    Case("rae", "cards", "kuhn_poker_cpu", (), ("eval/self_play/first/blunder", "eval/self_play/second/blunder"),
         falls=True, steps=40),
    Case("hierarchical_grpo", "sums", "proposer_solver_cpu", (), ("eval/given/reward",), rate="3e-4"),
)  # fmt: skip


def best_of_group(groups: Sequence[Sequence[Trajectory]], rewards: list[np.ndarray]) -> list[np.ndarray]:
    """A custom algorithm: whether a trajectory is as good as the best of its group, less the group's mean of that."""
    best = [(r == r.max(initial=0)).astype(float) for r in rewards]
    return [b - b.mean() if len(b) else b for b in best]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="algorithms; all of them when left out")
    parser.add_argument("--out", type=Path, required=True, help="folder of models and runs")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and sampling")
    options = parser.parse_args()
    out, astray = options.out.resolve(), []
    out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if not options.names or case.algorithm in options.names]
    print("| algorithm | signal | begin | end |\n| --- | --- | --- | --- |", flush=True)
    for case in cases:
        for name in ("teacher", case.warmup) if TEACHER[0] in case.overrides else (case.warmup,):
            warm_up(out, name)
        launch(out, case.algorithm, case.arguments(out, options.seed))
        rows = read_metrics(out / case.algorithm / "metrics.jsonl").values()
        for name in case.signal:
            begin, end = ends(rows, name)
            print(f"| {case.algorithm} | {name} | {begin:.3f} | {end:.3f} |", flush=True)
            if end <= begin if not case.falls else end >= begin:
                astray.append(f"{case.algorithm} ({name})")
    if astray:
        print("no progress:", ", ".join(astray))
    return bool(astray)


def warm_up(out: Path, name: str) -> None:
    """Make `out/name/model`, if it is not there."""
    folder, warmup = out / name, WARMUPS[name]
    if (folder / "model").exists():
        return
    examples = folder / "examples"
    subprocess.run([sys.executable, "-m", warmup.module, *warmup.arguments, "--out", str(examples)], check=True)
    stop_at = "null" if warmup.stop_at is None else warmup.stop_at
    launch(out, name, ["+experiment=tiny_sft_cpu", f"model.path={examples}", f"max_steps={warmup.steps}",
                       f"trainer.sft.probe.stop_at={stop_at}"])  # fmt: skip


def launch(out: Path, name: str, arguments: list[str]) -> None:
    """A run in `out/name`; what it says is kept in `out/name.log`."""
    command = [sys.executable, "-m", "prime_hpc.launch", *arguments, "launcher=local", f"run.name={name}",
               f"run.output_dir={out}"]  # fmt: skip
    with (out / f"{name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(Path.cwd())})


def ends(rows: Iterable[dict[str, Any]], name: str) -> tuple[float, float]:
    """Mean of a metric over the first and over the last rows that have it."""
    values = [row[name] for row in rows if name in row]
    if len(values) < 2:
        sys.exit(f"fewer than two steps have {name}")
    size = min(WINDOW, len(values) // 2)
    return fmean(values[:size]), fmean(values[-size:])


if __name__ == "__main__":
    sys.exit(main())
