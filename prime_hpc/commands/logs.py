"""Print the logs of a run, all processes merged by time.

    python -m prime_hpc.logs RUN [--process NAME ...] [--attempt N] [--follow]

A line without a clock belongs to the last one of its process that has one. Exit code 1: there are no logs yet.
"""

import heapq
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from prime_hpc.cluster.log_lines import to_text
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.commands import cli
from prime_hpc.errors import CommandLineError, ConfigProblem, nearest_name
from prime_hpc.observe.logs import LogFile, LogLine, find_logs
from prime_hpc.observe.run_facts import RunFacts, read_run

POLL_S = 0.5
FOLLOW_LINES = 10
"""Lines of every log that come before the new ones."""
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")

Row = tuple[LogFile, str]


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = cli.parser(__doc__)
    parser.add_argument("--process", action="append", help="only this process; may be repeated")
    parser.add_argument("--attempt", type=int, help="an earlier attempt than the newest")
    parser.add_argument("--follow", action="store_true", help="go on with new lines until the run has ended")
    args = parser.parse_args(arguments)

    def show() -> int:
        facts = read_run(args.run, args.attempt)
        if not facts.logs:
            print(f"{args.run} has no logs: no process of it was started yet", file=sys.stderr)
            return 1
        chosen = args.process or [log.process for log in facts.logs]
        _check(chosen, facts)
        logs = [log for log in facts.logs if log.process in chosen]
        printer = Printer(one=len(set(chosen)) == 1)
        printer.print(merge(logs) if not args.follow else follow(args.run, facts.attempt, chosen))
        return 0

    return cli.run(show)


class Printer:
    """Prints rows with the name of their process in a colour of its own."""

    def __init__(self, *, one: bool):
        self._console = Console(highlight=False, soft_wrap=True)
        self._one = one
        self._colours: dict[str, str] = {}

    def print(self, rows: Iterable[Row]) -> None:
        for log, text in rows:
            colour = self._colours.setdefault(log.process, COLOURS[len(self._colours) % len(COLOURS)])
            name = Text("" if self._one else f"{log.process} ", style=colour)
            self._console.print(name + Text(text))


def merge(logs: list[LogFile]) -> Iterator[Row]:
    """Every line of `logs`, by time; lines of one log stay in their order."""
    return ((log, line.text) for _, log, line in heapq.merge(*map(_timed, logs), key=lambda item: item[0]))


def follow(run_dir: Path, attempt: int, processes: list[str]) -> Iterator[Row]:
    """The last lines of every log, then new ones as they come, until the attempt has ended."""
    offsets: dict[Path, int] = {}
    known = find_logs(RunPaths(run_dir).logs(attempt))
    for log in known:
        offsets[log.path] = log.path.stat().st_size
        if log.process in processes:
            yield from ((log, line.text) for line in log.lines()[-FOLLOW_LINES:])
    while True:
        live = read_run(run_dir, attempt).live
        for log in find_logs(RunPaths(run_dir).logs(attempt)):
            if log.process in processes:
                yield from ((log, text) for text in _new_lines(log, offsets))
        if not live:
            return
        time.sleep(POLL_S)


def _new_lines(log: LogFile, offsets: dict[Path, int]) -> list[str]:
    """Whole lines written since the last look."""
    with log.path.open("rb") as file:
        file.seek(offsets.get(log.path, 0))
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    offsets[log.path] = offsets.get(log.path, 0) + len(whole)
    return [to_text(line) for line in whole.decode(errors="replace").splitlines()]


def _timed(log: LogFile) -> Iterator[tuple[float, LogFile, LogLine]]:
    """Lines with times that never fall, so that a merge keeps their order."""
    latest = 0.0
    for line in log.lines():
        latest = max(latest, line.time or 0.0)
        yield latest, log, line


def _check(chosen: list[str], facts: RunFacts) -> None:
    known = sorted({log.process for log in facts.logs})
    expected = f"one of {', '.join(known) or 'none yet'}"
    problems = [ConfigProblem("--process", name, expected, nearest_name(name, known)) for name in chosen
                if name not in known]  # fmt: skip
    if problems:
        raise CommandLineError(problems)


if __name__ == "__main__":
    sys.exit(main())
