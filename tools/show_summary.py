"""Print the numbers of a finished run and where its files lie: `python -m tools.show_summary RUN`."""

import argparse
import json
from pathlib import Path
from typing import Any

from prime_hpc.cluster.paths import RunPaths

SHOWN = ("steps", "reward_first5", "reward_last5", "mismatch_abs_mean", "loss_first", "loss_last", "probe_exact_match",
         "wall_s")  # fmt: skip


def describe(run: Path) -> str:
    """Lines of `name value` from `summary.json`, then the paths of the curve and of the newest attempt's logs."""
    path = RunPaths(run).summary
    if not path.exists():
        return f"{path} does not exist: the run has not ended; python -m prime_hpc.status {run} shows where it is"
    summary = json.loads(path.read_text())
    lines = [f"{name:<18} {_format(summary[name])}" for name in SHOWN if name in summary]
    curve = run / "reward_curve.png"
    if curve.exists():
        lines.append(f"{'reward curve':<18} {curve}")
    attempts = sorted((run / "logs").glob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    lines += [f"{'logs':<18} {path}" for path in attempts[-1:]]
    return "\n".join(lines)


def _format(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    print(describe(parser.parse_args().run))


if __name__ == "__main__":
    main()
