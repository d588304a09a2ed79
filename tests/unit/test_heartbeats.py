"""Who hangs, by beats alone, and what is nobody's fault; the lease by the same clock."""

from pathlib import Path

import pytest

from prime_hpc.cluster import lease as lease_module
from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.lease import LeaseReader
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.config.recovery import RecoveryConfig
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.launchers import heartbeats as module
from prime_hpc.launchers.heartbeats import Heartbeats


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Run:
    """Heartbeats of one process on a clock of the test's."""

    def __init__(self, tmp_path: Path, clock: Clock):
        self.paths, self.clock = RunPaths(tmp_path), clock
        self.hearts = Heartbeats(self.paths, RecoveryConfig(hang_s=20, stuck_s=100))

    def beat(self, time: float, progress: int = 1, wait: dict | None = None) -> None:
        record = {"time": time, "doing": "training step 3", "progress": progress, "wait": wait}
        write_json(self.paths.rendezvous / "beats" / "trainer-0.json", record)

    def after(self, seconds: float) -> str | None:
        """What is found when this long has passed, looking every second."""
        found = None
        for _ in range(int(seconds)):
            self.clock.now += 1
            found = self.hearts.find_hang("trainer-0")
        return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return Run(tmp_path, clock)


def test_silence_is_a_hang_after_its_time(run: Run) -> None:
    assert run.after(50) is None, "it never beat: it is still starting"
    run.beat(1.0)
    assert run.after(20) is None
    assert run.after(2) == "no sign of life for 21 s, last seen training step 3"


def test_life_without_progress_is_a_hang_unless_it_waits(run: Run) -> None:
    for second in range(1, 101):
        run.beat(float(second))
        assert run.after(1) is None
    run.beat(101.0, wait={"what": "batch 4", "owner": "orchestrator-0"})
    assert run.after(1) is None
    for second in range(102, 210):
        run.beat(float(second))
        found = run.after(1)
    assert found.startswith("no progress for 10")


def test_a_pause_of_the_supervisor_is_nobody_s_silence(run: Run) -> None:
    run.beat(1.0)
    assert run.after(10) is None
    run.clock.now += 300
    assert run.hearts.find_hang("trainer-0") is None
    assert run.after(9) is None
    assert run.after(3) is not None


def test_a_lease_lapses_by_the_supervisor_s_silence_and_not_by_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(lease_module.time, "monotonic", clock.monotonic)
    write_json(tmp_path / "lease.json", {"attempt": 1, "beat": 1.0})
    reader = LeaseReader(tmp_path, 1, lease_s=30)
    reader.check()
    clock.now += 500
    reader.check()
    for _ in range(30):
        clock.now += 1
        reader.check()
    clock.now += 1
    with pytest.raises(InfrastructureFailure, match="no sign for 30 s"):
        reader.check()
    write_json(tmp_path / "lease.json", {"attempt": 2, "beat": 2.0})
    clock.now += 500
    with pytest.raises(InfrastructureFailure, match="attempt 2 has taken over"):
        reader.check()
