"""The time to the first step, from snapshots of a run that comes up."""

import json
import time
from pathlib import Path

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.launchers.startup import Startup, describe
from prime_hpc.observe.snapshot import Snapshot
from tests.unit.test_slurm_steps import make_plan


class Listener:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown = 0

    def show(self, snapshot: Snapshot) -> None:
        self.shown += 1

    def say(self, text: str) -> None:
        self.said.append(text)


def test_milestones_are_noted_once_and_in_their_order(tmp_path: Path) -> None:
    plan, view, paths = make_plan("slurm_hetjob", "trainer.ranks=4", "env.workers=1"), Listener(), RunPaths(tmp_path)
    startup = Startup(plan, paths, view, began=time.time() - 100, queued_s=7.0)
    states = {process.name: "waiting" for process in plan.processes}
    moves = [{}, dict.fromkeys(states, "starting"), {f"trainer-{rank}": "ready" for rank in range(4)},
             {"env-words-0": "ready", "inference-0": "ready"}, {"orchestrator-0": "sampling"},
             {"trainer-0": "training"}, {"inference-0": "starting"}]  # fmt: skip
    for move in moves:
        states |= move
        startup.show(Snapshot(dict(states)))
    assert not paths.startup.exists()
    startup.show(Snapshot(states, {"step": 1}))
    startup.show(Snapshot(states, {"step": 2}))
    record = json.loads(paths.startup.read_text())
    assert list(record["seconds"]) == ["supervisor", "processes", "trainer", "environment", "inference", "orchestrator",
                                       "first batch", "first step"]  # fmt: skip
    assert record["queued_s"] == 7.0 and record["seconds"]["supervisor"] >= 100
    assert view.said == [f"startup: {describe(record['seconds'])}"] and view.shown == len(moves) + 2
