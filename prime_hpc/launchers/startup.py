"""How long a run takes to its first step, and when on the way everybody was where."""

import time
from collections.abc import Callable
from functools import partial

from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.launchers.view import View
from prime_hpc.observe.snapshot import Snapshot
from prime_hpc.plan.run_plan import RunPlan

NOT_READY = ("waiting", "starting")
AT_WORK = ("training", "trained", "done")


class Startup:
    """A view before another one that notes when each milestone was reached, in seconds since `began` (epoch).

    At the first step it says so and leaves `rendezvous/startup.json`. `queued_s` is how long the job had waited.
    """

    def __init__(self, plan: RunPlan, paths: RunPaths, view: View, began: float, queued_s: float | None = None):
        self._plan, self._paths, self._view, self._began = plan, paths, view, began
        self._queued_s = queued_s
        self._reached = {"supervisor": time.time() - began}
        self._milestones = self._make_milestones()

    def say(self, text: str) -> None:
        self._view.say(text)

    def show(self, snapshot: Snapshot) -> None:
        self._view.show(snapshot)
        if not self._milestones:
            return
        for name in [name for name, reached in self._milestones.items() if reached(snapshot)]:
            self._reached[name] = time.time() - self._began
            del self._milestones[name]
        if "first step" in self._reached:
            self._milestones.clear()
            self._report()

    def _make_milestones(self) -> dict[str, Callable[[Snapshot], bool]]:
        """What is waited for: every process has begun, components are ready, the first batch is there, is trained."""
        parts: dict[str, list[str]] = {}
        for process in self._plan.processes:
            parts.setdefault(process.component, []).append(process.name)
        return {
            "processes": lambda snapshot: "waiting" not in snapshot.states.values(),
            **{component: partial(_are_ready, names) for component, names in parts.items()},
            "first batch": lambda snapshot: snapshot.states.get("trainer-0") in AT_WORK,
            "first step": lambda snapshot: snapshot.progress.get("step") is not None,
        }

    def _report(self) -> None:
        seconds = {name: round(value, 1) for name, value in self._reached.items()}
        write_json(self._paths.startup, {"queued_s": self._queued_s, "seconds": seconds})
        self.say(f"startup: {describe(seconds)}")


def _are_ready(names: list[str], snapshot: Snapshot) -> bool:
    return not any(snapshot.states[name] in NOT_READY for name in names)


def describe(seconds: dict[str, float]) -> str:
    """`first step after 31.5 s (supervisor 1.2, processes 9.0, ...)`."""
    marks = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if name != "first step")
    return f"first step after {seconds['first step']:.1f} s ({marks})"
