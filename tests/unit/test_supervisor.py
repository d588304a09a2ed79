"""How an attempt that ends is taken down."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.cluster import control
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.run import RunConfig
from prime_hpc.launchers.supervisor import Ending, Supervisor
from prime_hpc.observe.events import read_events

SILENT = SimpleNamespace(show=lambda snapshot: None, say=lambda text: None)
IDLE = SimpleNamespace(stop=lambda running, grace_s: None)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    paths.control.mkdir(parents=True)
    return paths


def run(paths: RunPaths) -> Ending:
    plan = SimpleNamespace(attempt=1, processes=[])
    supervisor = Supervisor(plan, RunConfig(), paths, IDLE, SILENT, units=[])
    try:
        return supervisor.run()
    finally:
        supervisor.stop()


def test_a_run_that_was_told_to_stop_was_interrupted_and_says_by_whom(paths: RunPaths) -> None:
    control.ask(paths.control, "stop", "wrong data", by="ada")
    assert run(paths).kind == "stopped"
    assert [(e.kind, e.reason) for e in read_events(paths.root, 1)][1:] == [("interrupted", "ada asked: wrong data")]


def test_a_finished_run_is_complete(paths: RunPaths) -> None:
    (paths.rendezvous / "complete").touch()
    assert run(paths).kind == "complete"
    assert [(e.kind, e.reason) for e in read_events(paths.root, 1)][1:] == [("complete", "complete")]
