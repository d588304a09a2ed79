"""Show how far a run is and what its components do.

    python -m prime_hpc.status RUN [--watch] [--json]
    python -m prime_hpc.status RUN --ledger
    python -m prime_hpc.status RUN --endpoint

The ledger is what the run has cost over all its attempts, and what would make its steps shorter. The endpoint is where
other programs call the model that it serves: addresses, the model's name, the file with the token.

Exit code 0, or 2 where there is no such run, or no endpoint.
"""

import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prime_hpc.cluster.files import read_json
from prime_hpc.commands import cli
from prime_hpc.commands.endpoint import find
from prime_hpc.commands.ledger import render_ledger
from prime_hpc.launchers.slurm.queue import describe_wait
from prime_hpc.launchers.startup import describe
from prime_hpc.observe.advisor import advise
from prime_hpc.observe.console import open_console
from prime_hpc.observe.ledger import read_ledger
from prime_hpc.observe.run_facts import read_run
from prime_hpc.observe.status import ENDED, ProcessStatus, RunStatus, WaitStatus, take_status

PERIOD_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = cli.parser(__doc__)
    parser.add_argument("--watch", action="store_true", help="show it anew every two seconds while the run works")
    parser.add_argument("--json", action="store_true", help="every process, as JSON")
    parser.add_argument(
        "--ledger", action="store_true", help="waits, starts, recoveries, idle time, node-hours, advice"
    )
    parser.add_argument("--endpoint", action="store_true", help="where the model is called: address, name, token")
    args = parser.parse_args(arguments)

    def show() -> int:
        if args.endpoint:
            print(find(args.run))
            return 0
        if args.watch:
            return watch(args.run)
        if args.ledger:
            open_console().print(
                render_ledger(read_ledger(args.run, time.time()), advise(args.run, read_run(args.run).plan))
            )
            return 0
        facts = read_run(args.run)
        status = take_status(facts)
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(status)).decode())
        else:
            open_console().print(render(status))
            if status.phase == "queued" and (record := read_json(facts.paths.job)):
                print(f"\n{describe_wait(record['job_ids'][0])}".rstrip())
        return 0

    return cli.run(show)


def watch(run_dir: Path) -> int:
    """Show the status until the run has ended."""
    with Live(console=open_console(), refresh_per_second=2) as screen:
        while True:
            status = take_status(read_run(run_dir))
            screen.update(render(status))
            if status.phase in (*ENDED, "not started"):
                return 0
            time.sleep(PERIOD_S)


def render(status: RunStatus) -> RenderableType:
    """A line about the run, and a row a component."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("component", "processes", "state", "restarts", "longest wait"):
        table.add_column(column, overflow="fold")
    for component in dict.fromkeys(p.component for p in status.processes):
        table.add_row(component, *_row([p for p in status.processes if p.component == component]))
    startup = [describe(status.startup_s)] if status.startup_s else []
    paused = [Text(f"paused, since {status.paused}", style="red")] if status.paused else []
    evaluated = [f"evaluated {line}" for line in status.evaluated]
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in status.warnings]
    origin = [f"started from {status.started_from}"] if status.started_from else []
    return Group(_headline(status), *paused, *warnings, *origin, *startup, *evaluated, "", table)


def _headline(status: RunStatus) -> str:
    numbers = {
        "reward": _number(status.reward),
        "trained tokens/s": _number(status.trained_tokens_per_s),
        "sampled tokens/s": _number(status.sampled_tokens_per_s),
        "last progress": status.progress_age_s is not None and f"{status.progress_age_s:.0f} s ago",
    }
    head = f"{status.run}, attempt {status.attempt}: {status.phase}"
    if status.max_steps:
        head += f", step {status.step} of {status.max_steps}"
    if status.why:
        head += f": {status.why}"
    return " | ".join([head, *(f"{name} {value}" for name, value in numbers.items() if value)])


def _row(processes: list[ProcessStatus]) -> list[str]:
    states = ", ".join(f"{count} {state}" for state, count in Counter(p.state for p in processes).items())
    restarts = sum(p.restarts for p in processes)
    waits = [(p.wait.seconds, _wait(p.name, p.wait)) for p in processes if p.wait]
    _, longest = max(waits, default=(0.0, "-"))
    return [str(len(processes)), states, str(restarts), longest]


def _wait(name: str, wait: WaitStatus) -> str:
    return f"{name}: {wait.what} from {wait.owner}, {wait.seconds:.0f} of {wait.deadline_s:.0f} s"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
