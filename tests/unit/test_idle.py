"""When engines count as idle."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.orchestrator import ledger
from prime_hpc.transport.messages import PolicyVersion
from tests.unit.test_monitor import role


@pytest.mark.parametrize(("running", "idle"), [(0, 1.0), (8, 0.0)])
def test_engines_that_evaluate_are_not_idle(
    running: int, idle: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sampled to train on; what runs is of an evaluation."""
    monkeypatch.setattr(ledger, "TICK_S", 0.001)
    made = ledger.Ledger(role(tmp_path), start_step=0)
    scheduler = SimpleNamespace(inflight=0, ready_rollouts=0)
    pool, versions = SimpleNamespace(inflight=running), SimpleNamespace(served=PolicyVersion(0, 0))

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await made.report_progress(pool, scheduler, versions, SimpleNamespace(paused=None))

    asyncio.run(scenario())
    assert made._idle()["idle/inference"] == idle
