"""Requests and failures: what is started again, how often, and how an attempt that ends is taken down."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.cluster import control
from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.recovery import FailurePolicy, RecoveryConfig
from prime_hpc.config.run import RunConfig
from prime_hpc.launchers.supervisor import Ending, Supervisor
from prime_hpc.observe.events import read_events
from prime_hpc.plan.run_plan import NodeGroup, ProcessPlan
from prime_hpc.plan.units import Unit

SILENT = SimpleNamespace(show=lambda snapshot: None, say=lambda text: None)
PROCESS = ProcessPlan(name="inference-0", component="inference", index=0, node=0, command=[], log="")
ENGINE = Unit("inference-0", [PROCESS], NodeGroup(name="inference", first=0, nodes=1, gpus=0))
IDLE = SimpleNamespace(stop=lambda running, grace_s: None)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    paths.control.mkdir(parents=True)
    return paths


def run(paths: RunPaths, config: RunConfig | None = None) -> Ending:
    plan = SimpleNamespace(attempt=1, processes=[])
    supervisor = Supervisor(plan, config or RunConfig(), paths, IDLE, SILENT, units=[])
    try:
        return supervisor.run()
    finally:
        supervisor.stop()


def test_a_run_that_was_told_to_stop_was_interrupted_and_says_by_whom(paths: RunPaths) -> None:
    control.ask(paths.control, "stop", "wrong data", by="ada")
    assert run(paths).kind == "stopped"
    assert [(e.kind, e.reason) for e in read_events(paths.root, 1)][1:] == [("interrupted", "ada asked: wrong data")]


def test_who_gives_no_reason_leaves_none(paths: RunPaths) -> None:
    control.ask(paths.control, "stop", "", by="ada")
    assert run(paths).reason == "ada asked"


def test_a_finished_run_is_complete(paths: RunPaths) -> None:
    (paths.rendezvous / "complete").touch()
    assert run(paths).kind == "complete"
    assert [(e.kind, e.reason) for e in read_events(paths.root, 1)][1:] == [("complete", "complete")]


def test_a_fleet_that_is_drained_leaves_at_once_and_may_go_on(paths: RunPaths) -> None:
    control.ask(paths.control, "drain", "the time limit is near", by="Slurm", goes_on=True)
    ending = run(paths, RunConfig(mode="serve"))
    assert (ending.kind, ending.goes_on) == ("drained", True)
    assert ending.reason == "drained: Slurm asked: the time limit is near"
    assert read_events(paths.root, 1)[-1].drained
    assert (paths.rendezvous / "complete").exists(), "engines leave by this mark"


class Leaver:
    """A unit that leaves of its own accord, in the moment in which the run is declared complete."""

    def __init__(self, paths: RunPaths):
        self._paths = paths

    def start(self, unit: Unit, restart: int) -> "Leaver":
        return self

    def stop(self, running: list["Leaver"], grace_s: float) -> None:
        pass

    def exits(self) -> dict[str, int | None]:
        (self._paths.rendezvous / "complete").touch()
        return {"inference-0": 0}


def test_who_leaves_as_the_run_completes_has_not_failed(paths: RunPaths) -> None:
    supervisor = Supervisor(SimpleNamespace(attempt=1, processes=[]), RunConfig(), paths, Leaver(paths), SILENT,
                            units=[ENGINE])  # fmt: skip
    ending = supervisor.run()
    supervisor.stop()
    assert (ending.kind, [e.kind for e in read_events(paths.root, 1)]) == ("complete", ["start", "complete"])


class Doubtful:
    """A unit that runs without end, and whose weights somebody finds damaged whenever it was started."""

    def __init__(self, paths: RunPaths):
        self._paths, self.starts = paths, 0

    def start(self, unit: Unit, restart: int) -> "Doubtful":
        self.starts += 1
        control.ask(self._paths.control, "restart", "CorruptData: damaged", unit=unit.name, by="orchestrator-0")
        return self

    def stop(self, running: list["Doubtful"], grace_s: float) -> None:
        pass

    def exits(self) -> dict[str, int | None]:
        return {"inference-0": None}

    def last_words(self, process: str) -> str:
        return "its log"


def test_restarts_that_are_asked_for_count_in_the_budget(paths: RunPaths) -> None:
    policy = FailurePolicy(max_restarts=2)
    config = RunConfig(recovery=RecoveryConfig(inference=policy, backoff_s=0.01, backoff_max_s=0.01))
    doubtful = Doubtful(paths)
    supervisor = Supervisor(SimpleNamespace(attempt=1, processes=ENGINE.processes), config, paths, doubtful, SILENT,
                            units=[ENGINE])  # fmt: skip
    ending = supervisor.run()
    supervisor.stop()
    reason = "orchestrator-0 asked: CorruptData: damaged"
    assert (ending.kind, ending.failure.reason, doubtful.starts) == ("failed", reason, 3)
    events = read_events(paths.root, 1)
    assert [e.kind for e in events] == ["start", "asked", "restart", "asked", "restart", "asked", "stop"]
    assert events[1].reason == reason


class ShortLived:
    """A unit that gets to work, if it `serves`, and then ends, always by the same error."""

    def __init__(self, paths: RunPaths, *, serves: bool):
        self._record, self._serves = paths.rendezvous / "inference-0.json", serves
        self.starts = self._looks = 0

    def start(self, unit: Unit, restart: int) -> "ShortLived":
        self.starts, self._looks = self.starts + 1, 0
        write_json(
            self._record, {"state": "ready" if self._serves else "starting", "error": "out of memory", "time": 0.0}
        )
        return self

    def stop(self, running: list["ShortLived"], grace_s: float) -> None:
        pass

    def exits(self) -> dict[str, int | None]:
        self._looks += 1
        return {"inference-0": None if self._looks == 1 else 1}

    def last_words(self, process: str) -> str:
        return "its log"


@pytest.mark.parametrize(("mode", "serves", "starts"), [("serve", True, 6), ("serve", False, 3), ("rl", True, 3)])
def test_the_same_cause_ends_a_fleet_early_only_where_an_engine_never_served(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, mode: str, serves: bool, starts: int
) -> None:
    monkeypatch.setattr("prime_hpc.launchers.supervisor.POLL_S", 0.01)
    recovery = RecoveryConfig(inference=FailurePolicy(max_restarts=5), backoff_s=0.01, backoff_max_s=0.01)
    unit = ShortLived(paths, serves=serves)
    supervisor = Supervisor(SimpleNamespace(attempt=1, processes=ENGINE.processes),
                            RunConfig(mode=mode, recovery=recovery), paths, unit, SILENT, units=[ENGINE])  # fmt: skip
    assert supervisor.run().kind == "failed"
    supervisor.stop()
    assert unit.starts == starts
