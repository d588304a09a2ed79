"""Sweeps without Slurm: names, slots, budget, what becomes of failed points, and the table."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from prime_hpc.commands import sweep as command
from prime_hpc.errors import ConfigurationError
from prime_hpc.launchers.sweep import Sweep
from prime_hpc.observe.sweep import PointResult, dead, read_sweep
from tests.unit.run_dirs import RunDir

POINTS = [["+experiment=a", "++seed=1", "++env.train.0.args={x: 'a b'}"], ["+experiment=a", "++seed=2"]]
BUDGETED = {"launcher": {"name": "slurm_hetjob"}, "cluster": {"gpus_per_node": 4}}


def test_points_are_named_by_what_differs_and_dealt_to_slots(tmp_path: Path) -> None:
    config = OmegaConf.create({"run": {"output_dir": str(tmp_path)}})
    sweep = Sweep.of([*POINTS, POINTS[0]], "mine", config, max_parallel=2)
    assert sweep.folder == tmp_path / "mine"
    assert [point.name for point in sweep.points] == ["0_seed-1_args-x-a-b", "1_seed-2", "2_seed-1_args-x-a-b"]
    assert sweep.points[1].overrides == [*POINTS[1], f"++run.output_dir='{tmp_path}/mine'", "++run.name=1_seed-2",
                                         "++launcher.slot=mine.slot1"]  # fmt: skip
    assert [point.overrides[-1] for point in sweep.points] == [f"++launcher.slot=mine.slot{i}" for i in (0, 1, 0)]
    assert not any("slot" in o for p in Sweep.of(POINTS, "mine", config, max_parallel=0).points for o in p.overrides)


@pytest.mark.parametrize(("time", "budget", "complaint"), [
    ("10:00:00", 160.0, None),
    ("10:00:00", 159.0, "hydra.launcher.gpu_hours = 159.0: expected at least 160"),
    (None, 159.0, "cluster.time = None"),
])  # fmt: skip
def test_a_budget_is_held_against_what_all_points_may_use(tmp_path: Path, time, budget, complaint) -> None:
    sweep = Sweep.of(POINTS, "mine", OmegaConf.create({}), max_parallel=0)
    config: dict[str, Any] = {**BUDGETED, "cluster": {"gpus_per_node": 4, "time": time}, "trainer": {"ranks": 4},
                              "inference": {"gpus_per_replica": 4}, "hydra": {"job": {}}}  # fmt: skip
    configs = [OmegaConf.create(config)] * 2
    if complaint is None:
        return sweep.check_budget(configs, budget)
    with pytest.raises(ConfigurationError, match=complaint):
        sweep.check_budget(configs, budget)


def test_a_failed_point_is_remembered_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep.of(POINTS, "mine", OmegaConf.create({}), max_parallel=0)
    for point, code in zip(sweep.points, (1, 0), strict=True):
        with sweep.point(point):
            if code:
                sys.exit(code)
    with pytest.raises(SystemExit, match="1"):
        sweep.conclude()
    assert "1 of them failed to start or to end well: 0_seed-1_args-x-a-b" in capsys.readouterr().err


def test_a_refused_point_does_not_keep_the_others_from_being_written(tmp_path: Path, tiny_model: Path) -> None:
    arguments = ["+experiment=reverse_text_cpu", "launcher=dry_run", f"model.path={tiny_model}", "seq_len=64,100000",
                 f"run.output_dir={tmp_path}", "hydra.launcher.name=mine"]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "prime_hpc.launch", "-m", *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert "seq_len = 100000: expected at most" in done.stderr
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["0_seq_len-64", "sweep.json"]


def make_point(folder: Path, name: str, rewards: list[float], ending: str | None = None) -> RunDir:
    run = RunDir(folder / name)
    run.event("start", at=0)
    rows = [{"step": i, "time": 0.0, "loss": 0.0, "train/all/reward": r} for i, r in enumerate(rewards, 1)]
    run.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ending:
        run.event(ending, at=3600)
    return run


def test_the_table_has_every_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_point(tmp_path, "good", [0.1] * 5 + [0.9] * 5 + [0.5] * 5, "complete")
    make_point(tmp_path, "bad", [], "stop")
    make_point(tmp_path, "left", [0.2, 0.4], "interrupted")
    names = ("good", "bad", "left", "unborn")
    (tmp_path / "sweep.json").write_text(json.dumps({"points": [{"name": n, "overrides": []} for n in names]}))
    points = {point.name: point for point in read_sweep(tmp_path)}
    assert {name: point.state for name, point in points.items()} == {
        "good": "complete", "bad": "failed", "left": "stopped", "unborn": "not started"}  # fmt: skip
    good = points["good"]
    assert (good.first, good.last, good.best) == pytest.approx((0.1, 0.5, 0.9))
    assert points["left"].first == points["left"].last == pytest.approx(0.3)
    assert command.main([str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-4:]] == ["good", "left", "bad", "unborn"]


def test_points_of_a_fine_tuning_are_compared_by_their_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, losses in (("high", [3.0, 2.9]), ("low", [3.0, 1.1])):
        run = RunDir(tmp_path / name)
        run.configure(mode="sft")
        run.event("start", at=0)
        rows = [{"step": i, "time": 0.0, "loss": loss} for i, loss in enumerate(losses, 1)]
        run.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("unborn", "high", "low")
    (tmp_path / "sweep.json").write_text(json.dumps({"points": [{"name": n, "overrides": []} for n in names]}))
    assert command.main([str(tmp_path)]) == 0
    title, low, high, unborn = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert title[3:5] == ["loss:", "first"]
    assert (low[0], low[3:6], high[0], unborn[0]) == ("low", ["2.050"] * 3, "high", "unborn")


def test_points_leave_when_the_budget_is_used_or_their_reward_is_dead(tmp_path: Path) -> None:
    make_point(tmp_path, "dead", [0.3, 0.0, 0.0, 0.0])
    make_point(tmp_path, "alive", [0.0, 0.0, 0.1])
    points = [PointResult(name=name, overrides=[], state="running", gpu_hours=5.0) for name in ("dead", "alive")]
    assert [name for name, _ in command.due(tmp_path, points, None, 3)] == ["dead"]
    assert [name for name, _ in command.due(tmp_path, points, 10.0, None)] == ["dead", "alive"]
    assert list(command.due(tmp_path, points, 10.1, None)) == []
    assert not dead([0.0, 0.0], 3)
