"""On a real Slurm: sweeps run no more points at once than they may; plans are compared with the cluster."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_hpc.commands import stop
from prime_hpc.observe.sweep import PointResult, read_sweep
from tests.integration.runs import REPOSITORY
from tests.slurm.slurm_runs import TINY
from tools.slurm_sandbox import SlurmSandbox
from tools.slurm_sandbox.waiting import wait_for

pytestmark = pytest.mark.slurm

SMALL = (*TINY, "trainer.ranks=1", "inference.replicas=1", "cluster.cpus=1", "max_steps=2", "checkpoint.every=0")

POINTS = ("inference.engine_args.token_s=0.01,slow,0.02,0.03", "hydra.launcher.max_parallel=2",
          "hydra.launcher.name=mine")  # fmt: skip


def launch(
    sandbox: SlurmSandbox, output: Path, model: Path, *overrides: str, many: bool = False
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prime_hpc.launch", *(["-m"] if many else []),
               "+experiment=reverse_text_cpu", "launcher=slurm_hetjob",
               *SMALL, f"model.path={model}", f"run.output_dir={output}", *overrides]  # fmt: skip
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **sandbox.env}, text=True, capture_output=True)


def running(sandbox: SlurmSandbox) -> set[str]:
    """Leaders of the jobs that run now."""
    rows = sandbox.run(["squeue", "--noheader", "--format=%i %T"]).stdout.splitlines()
    return {row.split("+")[0] for row in rows if row.endswith(("RUNNING", "COMPLETING"))}


def test_a_slot_is_free_again_once_its_point_has_ended_however_it_did(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    """Engines alone, which work until they are stopped; the second of four cannot start."""
    launched = launch(slurm, tmp_path, tiny_model, "mode=serve", *POINTS, many=True)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    first, bad, third, fourth = (tmp_path / "mine" / point.name for point in read_sweep(tmp_path / "mine"))
    seen: list[set[str]] = []

    def states() -> dict[str, str]:
        """Of each point, `starting` until it is stopped: engines may be quick."""
        seen.append(running(slurm))
        return {point.name: point.state.replace("serving", "starting") for point in read_sweep(tmp_path / "mine")}

    wait_for(lambda: states()[fourth.name] == "starting", "the fourth point", "the slot of the failed one", 300)
    assert states() == {first.name: "starting", bad.name: "failed", third.name: "queued", fourth.name: "starting"}
    for point in (first, fourth, third):
        wait_for(lambda point=point: states()[point.name] == "starting", point.name, "its slot", 300)
        stop.request(point, "stop", "seen enough")
    wait_for(lambda: not running(slurm) and not slurm.jobs(), "the end", "the sweep", 300)
    assert max(map(len, seen)) == 2
    assert states() == {first.name: "stopped", bad.name: "failed", third.name: "stopped", fourth.name: "stopped"}


@pytest.mark.slow
def test_two_of_four_points_run_at_once_and_a_failed_one_stops_nobody(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    launched = launch(slurm, tmp_path, tiny_model, *POINTS, many=True)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    most, deadline = 0, time.monotonic() + 540
    while slurm.jobs():
        most = max(most, len(running(slurm)))
        assert time.monotonic() < deadline, read_sweep(tmp_path / "mine")
        time.sleep(0.5)
    assert most == 2
    points = {point.overrides[0].partition("=")[2]: point for point in read_sweep(tmp_path / "mine")}
    assert {value: (p.state, p.step) for value, p in points.items()} == {
        "0.01": ("complete", 2), "slow": ("failed", 0), "0.02": ("complete", 2), "0.03": ("complete", 2)}  # fmt: skip
    for point in points.values():
        metrics = tmp_path / "mine" / point.name / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if point.step else []
        rewards = [row["train/all/reward"] for row in rows if "train/all/reward" in row]
        assert point.last == (pytest.approx(sum(rewards) / len(rewards)) if rewards else None)


@pytest.mark.slow
def test_a_watched_sweep_ends_a_dead_point_and_then_all_whose_budget_is_used(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    """One point is always right, so that its reward never changes; the other learns on until nothing is left to pay."""
    launched = launch(slurm, tmp_path, tiny_model, "inference.engine_args.skill0=1.0,0.5", "max_steps=1000",
                      "orchestrator.drop_zero_advantage=false", "cluster.gpus_per_node=1", "trainer.device=cpu",
                      "hydra.launcher.name=mine", many=True)  # fmt: skip
    assert launched.returncode == 0, launched.stdout + launched.stderr
    dead, alive = (tmp_path / "mine" / point.name for point in read_sweep(tmp_path / "mine"))

    def results() -> dict[str, PointResult]:
        return {point.name: point for point in read_sweep(tmp_path / "mine")}

    def watch(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "prime_hpc.sweep", str(tmp_path / "mine"), "--watch", *words]
        return subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **slurm.env}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    with watch("--dead-after", "2") as watching:
        wait_for(lambda: results()[dead.name].state == "complete", dead.name, "the end of the dead point", 900)
        wait_for(lambda: results()[alive.name].step >= 2, alive.name, "two steps", 900)
        watching.kill()
    assert (results()[alive.name].state, results()[dead.name].last) == ("running", 1.0)
    used = sum(point.gpu_hours for point in results().values())
    assert used > 0
    with watch("--gpu-hours", f"{used:.9f}") as watching:
        assert watching.wait(900) == 0, watching.stdout.read()
    assert results()[alive.name].state == "complete"
    assert all(2 <= point.step < 1000 for point in results().values())
    reasons = [
        json.loads(line)["reason"]
        for point in (dead, alive)
        for line in (point / "events.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "drain"
    ]
    assert reasons[0] == "the reward has been the same for 2 steps"
    assert reasons[1].startswith("the sweep has used") and reasons[1].endswith("GPU-hours")


def test_what_the_cluster_does_not_have_is_refused_and_the_start_is_told(
    slurm: SlurmSandbox, tmp_path: Path, tiny_model: Path
) -> None:
    refused = launch(slurm, tmp_path, tiny_model, "cluster.components.trainer.partition=cpus", "run.name=bad")
    assert refused.returncode == 2
    assert "cluster.components.trainer.partition = 'cpus': expected one of all, cpu, gpu, preemptible" in refused.stderr
    assert not (tmp_path / "bad").exists() and not slurm.jobs()
    dry = launch(slurm, tmp_path, tiny_model, "launcher=dry_run", "launcher.target=slurm_hetjob", "run.name=dry")
    assert dry.returncode == 0, dry.stderr
    assert "Slurm would start job.sbatch with a time limit of 00:20:00 at " in dry.stdout
