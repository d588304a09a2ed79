"""One run in which every role fails at every point of its work, in three ways: `python -m tools.chaos --out FOLDER`.

It runs on an engine without a model. Each start of a role has one failure before it, so that a role is started as often
as it has cells; what the supervisor wrote down becomes a table. Exit code 1 where a promise was broken.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from prime_hpc.cluster.faults import VARIABLE, Fault
from prime_hpc.models.tiny import make_tiny_model
from prime_hpc.observe.events import Event, read_events
from tools.endurance import UNCHANGED, account, broken_promises

POINTS = {
    "trainer-0": {"save": ["during"]},
    "trainer-1": {"batch": ["before"], "step": ["before", "during", "after"], "update": ["before", "during", "after"],
                  "save": ["before", "after"], "shutdown": ["before", "during", "after"]},
    "orchestrator-0": {"sampling": ["before", "after"], "batch": ["before", "during", "after"],
                       "update": ["before", "during", "after"], "evaluation": ["before", "after"],
                       "shutdown": ["before", "during", "after"]},
    "inference-0": {"update": ["before", "during", "after"], "sampling": ["before", "during", "after"]},
    "env-reverse_text-0": {"sampling": ["before", "during", "after"]},
}  # fmt: skip
"""What each process passes by, in order; what comes at the end of a run comes last, and rank 0 alone publishes."""
ACTIONS = ("SIGKILL", "raise", "SIGSTOP")
"""In this order: a process that hangs is woken for its stacks, and may end the run before it is killed."""
UNITS = {"trainer-0": "trainer", "trainer-1": "trainer", "orchestrator-0": "orchestrator"}
HANG_S = 12
STEPS = 60
RECOVERED, CONTAINED, ENDED, NOT_REACHED = "recovered", "contained", "at the end of the run", "not reached"
OVERRIDES = (
    *UNCHANGED, "trainer.ranks=2", "env.workers=2", "inference.replicas=2", "checkpoint.every=2",
    "checkpoint.keep_last=1000", f"recovery.hang_s={HANG_S}", "env.eval.every=1",
    "env.eval.sources=[{id: prime_hpc.envs.reverse_text, name: held_out, args: {seed: 9}, num_tasks: 2, "
    "sampling: {max_tokens: 14}}]",
)  # fmt: skip
FAKE_ENGINE = (
    "inference.engine=tests.fake_engine",
    "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.02}",
)


class Cell(NamedTuple):
    """One failure: `action` befalls `process` at `point`."""

    process: str
    point: str
    action: str

    @property
    def unit(self) -> str:
        """What is started again after it."""
        return UNITS.get(self.process, self.process)

    @property
    def contained(self) -> bool:
        """An exception there fails one episode, request or update, which is tried again without any restart."""
        return self.action == "raise" and self.process.startswith(("env-", "inference-"))


@dataclass(frozen=True)
class Outcome:
    """What became of a cell; `seconds` from when the supervisor saw the failure until the unit was back at work.

    Where the next failure came before that, they last until the unit has recovered from both.
    """

    cell: Cell
    result: str
    seconds: float | None = None

    def __str__(self) -> str:
        return self.result if self.seconds is None else f"{self.seconds:.0f} s"


def all_cells() -> list[Cell]:
    """The whole table, in the order in which the cells of a process are met."""
    return [Cell(process, f"{phase}.{moment}", action) for process, phases in POINTS.items()
            for phase, moments in phases.items() for moment in moments for action in ACTIONS]  # fmt: skip


def make_faults(cells: Iterable[Cell]) -> list[Fault]:
    """One fault for each start of each unit; one that is contained shares a start with the next."""
    faults, restarts, met = [], Counter[str](), Counter[tuple[str, str, int]]()
    for cell in cells:
        place = cell.process, cell.point, restarts[cell.unit]
        met[place] += 1
        faults.append(Fault(process=cell.process, point=cell.point, action=cell.action, restart=restarts[cell.unit],
                            count=met[place]))  # fmt: skip
        restarts[cell.unit] += not cell.contained
    return faults


def outcomes(root: Path, faults: Iterable[Fault]) -> Iterator[Outcome]:
    """What became of each fault of the run at `root`."""
    events = read_events(root, 1)
    for fault in faults:
        cell = Cell(fault.process, fault.point, fault.action)
        suffix = f".restart_{fault.restart}" if fault.restart else ""
        log = root / "logs" / "attempt_1" / f"{fault.process}{suffix}.log"
        if not log.exists() or fault.told not in log.read_text(errors="replace"):
            yield Outcome(cell, NOT_REACHED)
        elif cell.contained:
            yield Outcome(cell, CONTAINED)
        else:
            yield _recovery(cell, fault.restart, events)


def _recovery(cell: Cell, restart: int, events: list[Event]) -> Outcome:
    mine = [e for e in events if e.unit == cell.unit]
    failed = next((e for e in mine if e.kind in ("exit", "hang") and e.restart == restart), None)
    back = next((e for e in mine if e.kind == "recovered" and e.restart > restart), None)
    return Outcome(cell, RECOVERED, back.time - failed.time) if failed and back else Outcome(cell, ENDED)


def render(rows: Sequence[Outcome]) -> str:
    """A Markdown table: a row a point, a column a way to fail."""
    lines = ["| role | point | killed | exception | suspended |", "| --- | --- | --- | --- | --- |"]
    found = {row.cell: str(row) for row in rows}
    for process, point in dict.fromkeys((row.cell.process, row.cell.point) for row in rows):
        shown = [found.get(Cell(process, point, action), "") for action in ACTIONS]
        lines.append(f"| {process.rpartition('-')[0].split('-')[0]} | {point} | {' | '.join(shown)} |")
    return "\n".join(lines)


def run(
    launcher: str, out: Path, steps: int, cells: Iterable[Cell], model: Path, *overrides: str
) -> tuple[int, list[Outcome], Path]:
    """The exit code of a run in which the cells happen, what became of each, and where the run lies.

    `launcher` is the module that starts it: `tools.forked`, or `prime_hpc.launch` for real engines.
    """
    faults, root = make_faults(cells), out / "chaos"
    environment = {**os.environ, VARIABLE: msgspec.json.encode(faults).decode()}
    command = [sys.executable, "-m", launcher, "+experiment=reverse_text_cpu", *OVERRIDES, *overrides,
               f"max_steps={steps}", "run.name=chaos", f"model.path={model}", f"run.output_dir={out}"]  # fmt: skip
    code = subprocess.run(command, env=environment).returncode
    return code, list(outcomes(root, faults)), root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    make_tiny_model(out / "model", seed=0, hidden_size=32, layers=2)
    code, rows, root = run("tools.forked", out, arguments.steps, all_cells(), out / "model", *FAKE_ENGINE)
    broken = broken_promises(root, arguments.steps)
    print(render(rows), "", account(root, arguments.steps), *broken, sep="\n")
    sys.exit(1 if code or broken or any(row.result == NOT_REACHED for row in rows) else 0)


if __name__ == "__main__":
    main()
