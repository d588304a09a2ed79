"""Collect the rollouts that a run has recorded as rows for SFT: JSON lines of messages, and tools where there are some.

    python -m prime_hpc.commands.collect RUN [--min-reward X] [--best K] [--source NAME] [--evaluation] [--out FILE]

Rollouts that failed, were cut short or show images are left out, and of equal conversations all but the first.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_hpc.cluster.files import write_atomic
from prime_hpc.commands import cli
from prime_hpc.errors import CommandLineError, ConfigProblem, InfrastructureFailure, nearest_name
from prime_hpc.observe.records import evaluation_folders, read_records, record_path, recorded_steps
from prime_hpc.observe.run_facts import read_run
from prime_hpc.observe.selection import Selection


def main(arguments: list[str] | None = None) -> int:
    """0, 1 where no rollout is left, or 2 where nothing is recorded or the file is there already."""
    parser = cli.parser(__doc__)
    parser.add_argument("--min-reward", type=float, metavar="X", help="rollouts with at least this reward")
    parser.add_argument("--best", type=_positive, metavar="K", help="of each task the K with the highest rewards")
    parser.add_argument("--source", metavar="NAME", help="of this source alone")
    parser.add_argument("--evaluation", action="store_true", help="what was sampled to evaluate, in place of batches")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a new file; RUN/export/sft.jsonl when left out")
    args = parser.parse_args(arguments)

    def collect_rows() -> int:
        paths = read_run(args.run).paths
        folders = evaluation_folders(paths.rollouts) if args.evaluation else [paths.rollouts]
        out = args.out or paths.root / "export" / "sft.jsonl"
        return collect(folders, args.source, Selection(args.min_reward, args.best), out)

    return cli.run(collect_rows)


def collect(folders: list[Path], source: str | None, selection: Selection, out: Path) -> int:
    """Write the rows and say how many there are, and what was left out.

    Raises:
        CommandLineError: `out` exists, or no rollout is of `source`.
        InfrastructureFailure: nothing is recorded in `folders`.
    """
    if out.exists():
        raise CommandLineError([ConfigProblem("--out", str(out), "a file that is not there yet")])
    if not any(recorded_steps(folder) for folder in folders):
        raise InfrastructureFailure("no rollouts are recorded: nothing was sampled yet, or monitor.rollouts is off")
    rows = selection.rows(_records(folders, source))
    left_out = "; left out: " + ", ".join(f"{n} {why}" for why, n in selection.left_out.most_common())
    said = left_out if selection.left_out else ""
    if not rows:
        print(f"no rollout is left, so nothing was written{said}")
        return 1
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    tasks = len({(row["source"], row["task_id"]) for row in rows})
    print(f"{out}: {len(rows)} rows of {tasks} tasks{said}")
    return 0


def _records(folders: list[Path], source: str | None) -> Iterator[dict[str, Any]]:
    sources = set()
    files = [record_path(folder, step) for folder in folders for step in recorded_steps(folder)]
    for file in files:
        for record in read_records(file):
            sources.add(record["source"])
            if source in (None, record["source"]):
                yield record
    if source is not None and source not in sources:
        expected = f"one of {', '.join(sorted(sources))}"
        raise CommandLineError([ConfigProblem("--source", source, expected, nearest_name(source, sorted(sources)))])


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
