"""Commands on runs of real processes: a resume as a user types it, and the doctor on real deaths."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from prime_hpc.observe.doctor import diagnose
from prime_hpc.observe.run_facts import read_run
from prime_hpc.plan import run_plan
from prime_hpc.transport import checkpoints
from tests.integration.runs import REPOSITORY, TINY, ForkedRun, RunDirectory

SKILL = "inference.engine_args={skill0: 0.3, skill_per_version: 0.0, token_s: 0.002}"
STEP = 20


def command(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", f"prime_hpc.{verb}", *arguments], cwd=REPOSITORY, capture_output=True,
                          text=True, timeout=300)  # fmt: skip


def kill(run: RunDirectory, process: str) -> None:
    os.kill(run.record(process)["pid"], signal.SIGKILL)


def test_resume_goes_on_with_the_saved_configuration(tmp_path: Path, tiny_model: Path) -> None:
    first = command("launch", "+experiment=reverse_text_cpu", f"model.path={tiny_model}", f"run.output_dir={tmp_path}",
                    "run.name=mine", "optimizer.lr=3e-5", "launcher=dry_run", *TINY)  # fmt: skip
    assert first.returncode == 0, first.stderr
    run = tmp_path / "mine"
    before = run_plan.load(run / "plan.json")
    (run / "logs" / "attempt_1").mkdir(parents=True)
    partial = checkpoints.partial_path(run / "checkpoints", STEP)
    partial.mkdir(parents=True)
    manifest = checkpoints.CheckpointManifest(step=STEP, lineage=0, world=1, journal_offset=0, files={},
                                              config=before.config)  # fmt: skip
    checkpoints.publish(partial, manifest)
    moved = shutil.move(run, tmp_path / "elsewhere")
    again = command("resume", str(moved), "max_steps=120", "launcher=dry_run")
    assert again.returncode == 0, again.stderr
    said = "".join(again.stdout.split())
    assert f"elsewhere:attempt2,rl,120steps,resumes{moved}/checkpoints/step_{STEP}" in said
    assert f"{moved}exists,sonothingwaswritten" in said
    assert run_plan.load(moved / "plan.json") == before

    refused = command("resume", str(moved), "optimizer.lr=0.1")
    assert refused.returncode == 2
    assert "optimizer.lr = 0.1: expected 3e-05 as in the checkpoint" in refused.stderr


def test_an_environment_that_does_not_load_is_diagnosed(tmp_path: Path, tiny_model: Path) -> None:
    run = ForkedRun(tmp_path, tiny_model, "broken", SKILL, "env.train=[{id: prime_hpc.envs.reverse_text, "
                   "args: {min_len: 9, max_len: 3}, sampling: {max_tokens: 14}}]")  # fmt: skip
    assert run.wait()[0] == 1
    diagnosis = diagnose(read_run(run.root))
    assert (diagnosis.process, diagnosis.cause) == ("env-reverse_text-0", "environment does not load")
    assert any("min_len is 9, more than max_len, which is 3" in evidence.text for evidence in diagnosis.evidence)


def test_a_killed_rank_is_to_blame_and_not_the_peer_that_missed_it(tmp_path: Path, tiny_model: Path) -> None:
    run = ForkedRun(tmp_path, tiny_model, "killed", SKILL, "trainer.ranks=2", "max_steps=500",
                   "recovery.trainer.on_failure=stop")  # fmt: skip
    run.wait_for_step(1)
    kill(run, "trainer-1")
    code, text = run.wait()
    assert code == 1, text
    diagnosis = diagnose(read_run(run.root))
    assert (diagnosis.process, diagnosis.rank, diagnosis.verdict) == ("trainer-1", 1, "failed")
    assert diagnosis.cause in ("killed", "peer lost")
    shown = command("doctor", str(run.root))
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (1, diagnosis.headline)
