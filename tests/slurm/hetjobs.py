"""Heterogeneous jobs that report what happens to them."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.slurm_sandbox import SlurmSandbox
from tools.slurm_sandbox.waiting import wait_for

TASK = Path(__file__).parent / "task.py"
START_S = 240.0
# Counts of component 0 would else be every step's.
SRUN = "env --unset=SLURM_NTASKS --unset=SLURM_NPROCS srun"


@dataclass(frozen=True)
class Component:
    """Options of its block, how many nodes it has and how many tasks run on each."""

    options: str
    nodes: int = 1
    tasks: int = 1


@dataclass(frozen=True)
class HetJob:
    """A submitted job; its files lie in `folder`."""

    sandbox: SlurmSandbox
    folder: Path
    id: str
    components: Sequence[Component]

    def raw_id(self, group: int) -> str:
        """The id of one component: they are consecutive."""
        return str(int(self.id) + group)

    def finish(self) -> None:
        """Let every task end."""
        (self.folder / "end").touch()

    def reports(self, group: int, rank: int = 0) -> list[dict[str, Any]]:
        """What a task has said; a line without its end is still being written."""
        path = self.folder / f"{group}.{rank}"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def signals(self, group: int, rank: int = 0) -> list[str]:
        return [report["signal"] for report in self.reports(group, rank) if "signal" in report]

    def starts(self, group: int, rank: int = 0) -> list[dict[str, Any]]:
        """The task's first words, once for every time that it was started."""
        return [report for report in self.reports(group, rank) if "env" in report]

    def env(self, group: int, rank: int = 0) -> dict[str, str]:
        return self.starts(group, rank)[-1]["env"]

    def batch_signals(self) -> list[str]:
        path = self.folder / "batch"
        return path.read_text().split() if path.exists() else []

    def wait_for_tasks(self, starts: int = 1) -> None:
        """Until every task has started for the `starts`-th time."""
        ranks = [(group, rank) for group, part in enumerate(self.components) for rank in range(part.nodes * part.tasks)]
        wait_for(
            lambda: all(len(self.starts(*rank)) >= starts for rank in ranks), "its tasks", f"job {self.id}", START_S
        )

    def wait_for_signal(self, name: str, group: int, rank: int = 0) -> None:
        wait_for(lambda: name in self.signals(group, rank), name, f"task {rank} of group {group}", START_S)


def submit(sandbox: SlurmSandbox, folder: Path, components: Sequence[Component], step_options: str = "") -> HetJob:
    """Submit a job with one step a component, each running `task.py`."""
    folder.mkdir(exist_ok=True)
    (folder / "job.sh").write_text(script(components, step_options))
    job = sandbox.submit(f"--chdir={folder}", str(folder / "job.sh"))
    return HetJob(sandbox, folder, job, components)


def script(components: Sequence[Component], step_options: str = "") -> str:
    """The batch script; it notes its own signals and ends when its steps have."""
    blocks = [f"#SBATCH {part.options} --nodes={part.nodes} --ntasks-per-node={part.tasks}" for part in components]
    steps = [_step(group, part, step_options) for group, part in enumerate(components)]
    return "\n".join([
        "#!/bin/bash",
        "\n#SBATCH hetjob\n".join(blocks),
        "for name in USR1 USR2 TERM; do trap \"echo $name >> batch\" $name; done",
        *steps,
        "while [ -n \"$(jobs -r)\" ]; do wait; done",
        "",
    ])  # fmt: skip


def _step(group: int, part: Component, options: str) -> str:
    shape = f"--het-group={group} --nodes={part.nodes} --ntasks-per-node={part.tasks}"
    return f"{SRUN} {shape} {options} bash -c 'exec {sys.executable} {TASK} {group}.$SLURM_PROCID end' &"
