"""What a person sees while a run works: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prime_hpc.observe.console import open_console
from prime_hpc.observe.snapshot import Snapshot
from prime_hpc.plan.run_plan import RunPlan


class View(Protocol):
    """Something that shows snapshots and sentences."""

    def show(self, snapshot: Snapshot) -> None: ...

    def say(self, text: str) -> None: ...


@contextmanager
def open_view(plan: RunPlan, live: bool) -> Iterator[View]:
    """A live table where the output is a terminal and `live` is wanted, plain lines otherwise."""
    console = open_console()
    if not (live and console.is_terminal):
        yield PlainView(console)
        return
    with Live(console=console, refresh_per_second=4) as screen:
        yield LiveView(plan, console, screen)


class PlainView:
    """One line for every change of a state, every reason for a pause, every warning, every new step and every
    evaluation."""

    def __init__(self, console: Console):
        self._console = console
        self._states: dict[str, str] = {}
        self._reached: dict[str, Any] = {}
        self._paused = ""
        self._warned: set[str] = set()

    def show(self, snapshot: Snapshot) -> None:
        for name, state in snapshot.states.items():
            if self._states.get(name, "waiting") != state:
                self.say(f"{name}: {state}")
        self._states = snapshot.states
        if snapshot.paused not in ("", self._paused):
            self.say(f"paused, since {snapshot.paused}")
        self._paused = snapshot.paused
        subjects = {warning.partition(" = ")[0]: warning for warning in snapshot.warnings}
        for warning in (subjects[subject] for subject in subjects if subject not in self._warned):
            self.say(f"warning: {warning}")
        self._warned = set(subjects)
        told = snapshot.progress.items()
        reached = {name: value for name, value in told if name == "step" or name.startswith("eval")}
        if reached and reached != self._reached:
            self.say(progress_line(snapshot))
        self._reached = reached

    def say(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)


class LiveView:
    """The states of all processes and the newest progress."""

    def __init__(self, plan: RunPlan, console: Console, screen: Live):
        self._plan, self._console, self._screen = plan, console, screen

    def show(self, snapshot: Snapshot) -> None:
        table = Table(title=self._plan.name, box=None, pad_edge=False)
        table.add_column("process")
        table.add_column("state")
        for name, state in snapshot.states.items():
            table.add_row(name, Text(state, style="red" if state == "failed" else ""))
        paused = [Text(f"paused, since {snapshot.paused}", style="red")] if snapshot.paused else []
        warnings = [Text(f"warning: {warning}", style="yellow") for warning in snapshot.warnings]
        self._screen.update(Group(table, "", progress_line(snapshot), *paused, *warnings))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def progress_line(snapshot: Snapshot) -> str:
    """`step 12/60 | reward 0.53 | ...` from whatever the run reports."""
    progress = dict(snapshot.progress)
    parts = [f"step {progress.pop('step')}/{progress.pop('of')}"] if {"step", "of"} <= progress.keys() else []
    for key, value in progress.items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(f"{key.replace('_', ' ')} {text}")
    return " | ".join(parts)
