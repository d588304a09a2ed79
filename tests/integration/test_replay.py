"""A run whose values change while it works, and its last step once more from what it left behind."""

import os
import sys
from pathlib import Path

from prime_hpc.commands.preview import main as preview
from prime_hpc.commands.tune import tuned
from tests.integration.runs import ForkedRun
from tests.warm import start_warm


def test_a_step_comes_out_again_bit_by_bit(tmp_path: Path, tiny_model: Path) -> None:
    run = ForkedRun(tmp_path, tiny_model, "first", "max_steps=6", "checkpoint.every=4", "trainer.ranks=2",
                   "optimizer.lr=1e-3", "inference.engine_args={skill0: 0.4, token_s: 0.02}")  # fmt: skip
    run.wait_for_step(1)
    tuned(run.root, {"optimizer.lr": 5e-4, "orchestrator.max_staleness": 4})
    code, text = run.wait(600)
    assert code == 0, text
    log = run.log("orchestrator-0")
    assert "what trains in the first batch" in log
    assert "changed while running: optimizer.lr = 0.0005, orchestrator.max_staleness = 4" in log
    rates = {row["step"]: row["optim/lr"] for row in run.metrics if "loss" in row}
    assert rates[1] == 1e-3 and rates[6] == 5e-4
    assert preview([str(run.root), "--step", "2", "--count", "1"]) == 0

    replay, said = [sys.executable, "-m", "tools.replay", str(run.root), "--step", "6"], tmp_path / "said"
    assert start_warm(replay, dict(os.environ), said).wait(600) == 0, said.read_text()
    assert said.read_text().count("equal") == 2
