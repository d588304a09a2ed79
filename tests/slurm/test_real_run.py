"""The demo's RL on real vLLM as one heterogeneous job: a node for the orchestrator, two of engines, two of ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import REPOSITORY
from tests.slurm.slurm_runs import SlurmRun
from tools.slurm_sandbox import SlurmSandbox

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

REAL = ("inference.engine=prime_hpc.inference", "inference.engine_args={}", "orchestrator.batch_size=128",
        "orchestrator.group_size=8", "trainer.ranks=4", "env.workers=2", "cluster.time='01:00:00'",
        "checkpoint.every=20", "cluster.start_timeout_s=1200", "inference.start_timeout_s=1200",
        "recovery.hang_s=120")  # fmt: skip


def warm_model(folder: Path) -> Path:
    """The demo's model after its SFT."""
    make = [sys.executable, "-m", "tools.make_reverse_text", "--out", str(folder / "tiny"), "--seed", "0"]
    subprocess.run(make, cwd=REPOSITORY, check=True)
    train = [sys.executable, "-m", "prime_hpc.launch", "+experiment=reverse_text_sft_cpu", "launcher=local",
             f"model.path={folder / 'tiny'}", f"trainer.sft.data={folder / 'tiny' / 'sft.jsonl'}", "run.name=sft",
             f"run.output_dir={folder}"]  # fmt: skip
    subprocess.run(train, cwd=REPOSITORY, check=True, env=dict(os.environ))
    return folder / "sft" / "model"


def test_rewards_rise_in_a_heterogeneous_job(slurm: SlurmSandbox, tmp_path: Path) -> None:
    run = SlurmRun(slurm, tmp_path, warm_model(tmp_path), "real", "max_steps=30", *REAL)
    run.until_complete(2400)
    summary = json.loads((run.root / "summary.json").read_text())
    assert summary["reward_last5"] > summary["reward_first5"] + 0.05
    assert summary["mismatch_abs_mean"] < 1e-4 and summary["mismatch_tokens"] > 500
    assert len(slurm.accounted(run.job.job_id, "COMPLETED", 3)) == 3
    assert not [event for event in run.events if event["kind"] in ("exit", "hang")]
