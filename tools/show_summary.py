"""Print the numbers of a finished run and where its files lie: `python -m tools.show_summary RUN`.

Exit code 1: the run has no summary; 2: there is no such run.
"""

import json
import sys
from pathlib import Path
from typing import Any

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.commands import cli
from prime_hpc.observe.run_facts import read_run
from prime_hpc.observe.status import take_status

SHOWN = ("steps", "reward_first5", "reward_last5", "mismatch_abs_mean", "loss_first", "loss_last", "probe_exact_match",
         "wall_s")  # fmt: skip


def describe(run: Path) -> str:
    """Lines of `name value` from `summary.json`, then the paths of the curve and of the newest attempt's logs."""
    summary = json.loads(RunPaths(run).summary.read_text())
    lines = [f"{name:<18} {_format(summary[name])}" for name in SHOWN if name in summary]
    curve = run / "reward_curve.png"
    if curve.exists():
        lines.append(f"{'reward curve':<18} {curve}")
    attempts = sorted((run / "logs").glob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    lines += [f"{'logs':<18} {path}" for path in attempts[-1:]]
    return "\n".join(lines)


def _format(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    args = cli.parser(__doc__).parse_args(arguments)

    def show() -> int:
        facts = read_run(args.run)
        if not facts.paths.summary.exists():
            print(f"{args.run} has no summary, which is written at the end of a run; it is {take_status(facts).phase}: "
                  f"python -m prime_hpc.status {args.run}", file=sys.stderr)  # fmt: skip
            return 1
        print(describe(args.run))
        return 0

    return cli.run(show)


if __name__ == "__main__":
    sys.exit(main())
