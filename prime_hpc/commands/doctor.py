"""Say why a run is dead or stuck: the first failing process, its cause, the evidence and what to do.

    python -m prime_hpc.doctor RUN [--attempt N] [--json]

Changes nothing. Exit code 0: healthy or complete; 1: a cause was found; 2: unknown, or there is no such run.
"""

import sys
from datetime import datetime

import msgspec
from rich.console import Console
from rich.text import Text

from prime_hpc.commands import cli
from prime_hpc.observe.doctor import Diagnosis, diagnose
from prime_hpc.observe.run_facts import read_run

COLOURS = {"healthy": "green", "complete": "green", "failed": "red", "unknown": "yellow"}


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = cli.parser(__doc__)
    parser.add_argument("--attempt", type=int, help="an earlier attempt than the newest")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    args = parser.parse_args(arguments)

    def examine() -> int:
        diagnosis = diagnose(read_run(args.run, args.attempt))
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(diagnosis)).decode())
        else:
            show(diagnosis, Console(highlight=False, soft_wrap=True))
        return diagnosis.exit_status

    return cli.run(examine)


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis for people."""
    console.print(Text(diagnosis.headline, style=f"bold {COLOURS[diagnosis.verdict]}"))
    console.print(Text(_facts(diagnosis), style="dim"))
    _list(console, "evidence", [f"{e.file}{f':{e.line}' if e.line else ''}  {e.text}" for e in diagnosis.evidence])
    _list(console, "remedy", [diagnosis.remedy] if diagnosis.remedy else [])
    _list(console, "failed after it", diagnosis.followed)
    _list(console, "before", diagnosis.notes)


def _facts(diagnosis: Diagnosis) -> str:
    parts = [f"{diagnosis.run}, attempt {diagnosis.attempt}"]
    if diagnosis.time is not None:
        parts.append(f"{datetime.fromtimestamp(diagnosis.time):%Y-%m-%d %H:%M:%S}")
    if diagnosis.cause:
        parts.append(diagnosis.cause)
    if diagnosis.component:
        parts.append(diagnosis.component + (f" rank {diagnosis.rank}" if diagnosis.rank is not None else ""))
    if diagnosis.exit_code is not None:
        parts.append(f"exit code {diagnosis.exit_code}")
    return " | ".join(parts)


def _list(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print(Text(f"\n{title}:"))
    for line in lines:
        console.print(Text(f"  {line}"))


if __name__ == "__main__":
    sys.exit(main())
