"""Compare the points of a sweep, and keep it within its budget.

    python -m prime_hpc.sweep RESULTS_DIR [--json]
    python -m prime_hpc.sweep RESULTS_DIR --watch [--gpu-hours N] [--dead-after STEPS]

With --watch the table is shown anew until every point has ended. Meanwhile --gpu-hours stops all points, saved, once
they have used so many together, and --dead-after a point whose reward has not changed at all for so many steps.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.live import Live
from rich.table import Table

from prime_hpc.cluster import control
from prime_hpc.commands import cli
from prime_hpc.errors import CommandLineError, ConfigProblem
from prime_hpc.launchers.slurm.executor import find
from prime_hpc.observe.console import open_console
from prime_hpc.observe.run_facts import read_run
from prime_hpc.observe.status import ENDED
from prime_hpc.observe.sweep import PointResult, dead, read_sweep, rewards_of

PERIOD_S = 5.0
LIVE = ("starting", "running")


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RESULTS_DIR", type=lambda text: Path(text).absolute())
    parser.add_argument("--json", action="store_true", help="every point, as JSON")
    parser.add_argument("--watch", action="store_true", help="until every point has ended")
    parser.add_argument("--gpu-hours", type=float, help="with --watch: stop all points past this")
    parser.add_argument("--dead-after", type=int, metavar="STEPS", help="with --watch: stop points without progress")
    args = parser.parse_args(arguments)

    def show() -> int:
        points = _read(args.folder)
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(points)).decode())
        elif args.watch:
            watch(args.folder, args.gpu_hours, args.dead_after)
        else:
            open_console().print(render(points))
        return 0

    return cli.run(show)


def watch(folder: Path, gpu_hours: float | None, dead_after: int | None) -> None:
    """Show the table until every point has ended, and ask those to leave that should."""
    asked: set[str] = set()
    with Live(console=open_console(), refresh_per_second=1) as screen:
        while True:
            points = _read(folder)
            screen.update(render(points))
            for name, why in due(folder, points, gpu_hours, dead_after):
                if name not in asked:
                    dismiss(folder / name, why)
                    asked.add(name)
            if all(point.state in ENDED or (point.state == "queued" and point.name in asked) for point in points):
                return
            time.sleep(PERIOD_S)


def dismiss(run: Path, why: str) -> None:
    """Have a point leave after its step, saved; one that still waits is cancelled."""
    facts = read_run(run)
    job = None if facts.events else find(facts.plan)
    if job:
        job.cancel()
    else:
        control.ask(facts.paths.control, "drain", why)


def due(folder: Path, points: list[PointResult], gpu_hours: float | None,
        dead_after: int | None) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Points that should leave, and why."""
    used = sum(point.gpu_hours for point in points)
    for point in points:
        if gpu_hours is not None and used >= gpu_hours and point.state in (*LIVE, "queued"):
            yield point.name, f"the sweep has used {used:.1f} of {gpu_hours:g} GPU-hours"
        elif dead_after and point.state in LIVE and dead(rewards_of(read_run(folder / point.name)), dead_after):
            yield point.name, f"the reward has been the same for {dead_after} steps"


def render(points: list[PointResult]) -> Table:
    """A row a point, the highest of the last rewards first, in SFT the lowest of the last losses."""
    measure = next((point for point in points if point.last is not None), points[0]).measure
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("point", "state", "step", f"{measure}: first", "last", "best", "GPU-hours", "overrides"):
        table.add_column(column, overflow="fold")
    sign = -1 if measure == "reward" else 1
    for point in sorted(points, key=lambda p: float("inf") if p.last is None else sign * p.last):
        values = ["-" if value is None else f"{value:.3f}" for value in (point.first, point.last, point.best)]
        table.add_row(point.name, point.state, f"{point.step}/{point.max_steps}", *values, f"{point.gpu_hours:.2f}",
                      " ".join(point.overrides))  # fmt: skip
    return table


def _read(folder: Path) -> list[PointResult]:
    points = read_sweep(folder)
    if not points:
        raise CommandLineError([ConfigProblem("RESULTS_DIR", str(folder), "a folder with runs, such as a sweep's")])
    return points


if __name__ == "__main__":
    sys.exit(main())
