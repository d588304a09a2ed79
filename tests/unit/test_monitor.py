"""metrics.jsonl across attempts, W&B offline, and the reward curve."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.cluster import secrets
from prime_hpc.cluster.role import Role
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.config.sections import MonitorConfig
from prime_hpc.errors import ConfigurationError
from prime_hpc.observe.curve import draw_reward_curve
from prime_hpc.observe.monitor import Monitor, read_metrics
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan
from prime_hpc.transport.checkpoints import CheckpointManifest, partial_path, publish


def role(run_dir: Path, attempt: int = 1, checkpoint: Path | None = None, monitor: MonitorConfig | None = None) -> Role:
    secrets.create(run_dir)
    process = ProcessPlan(name="orchestrator-0", component="orchestrator", index=0, node=0, command=[], log="")
    config = replace(RunConfig(), monitor=monitor or MonitorConfig())
    plan = RunPlan(name="run-a", run_dir=str(run_dir), attempt=attempt, nodes=1, forks=[],
                   checkpoint=str(checkpoint) if checkpoint else None, processes=[process],
                   config=to_dict(config))  # fmt: skip
    return Role(plan, process)


def checkpoint(role: Role, step: int) -> Path:
    partial = partial_path(role.paths.checkpoints, step)
    partial.mkdir(parents=True)
    return publish(partial, CheckpointManifest(step=step, lineage=0, world=1, journal_offset=0, files={}, config={}))


def losses(role: Role) -> dict[int, float]:
    return {step: row["loss"] for step, row in read_metrics(role.paths.metrics).items()}


def test_a_row_is_one_json_object_with_step_and_time(tmp_path):
    it = role(tmp_path)
    monitor = Monitor(it)
    monitor.log(1, {"loss": 0.5})
    [line] = it.paths.metrics.read_text().splitlines()  # on disk before close
    row = json.loads(line)
    assert row.keys() == {"step", "time", "loss"}
    assert (row["step"], row["loss"]) == (1, 0.5)
    monitor.close()


def test_values_that_are_not_finite_become_null_and_are_warned_about_once(tmp_path, caplog):
    it = role(tmp_path)
    monitor = Monitor(it)
    with caplog.at_level(logging.WARNING):
        monitor.log(1, {"loss": float("nan"), "kl": 1.0})
        monitor.log(2, {"loss": float("inf"), "kl": float("-inf")})
    monitor.close()
    rows = read_metrics(it.paths.metrics)
    assert [(row["loss"], row["kl"]) for row in rows.values()] == [(None, 1.0), (None, None)]
    assert [record.args[0] for record in caplog.records] == ["loss", "kl"]


def test_rows_of_a_step_are_merged_and_the_last_value_wins(tmp_path):
    it = role(tmp_path)
    monitor = Monitor(it)
    monitor.log(2, {"loss": 1.0, "reward": 0.5})
    monitor.log(1, {"loss": 3.0})
    monitor.log(2, {"loss": 2.0, "eval": 0.25})
    monitor.close()
    rows = read_metrics(it.paths.metrics)
    assert list(rows) == [1, 2]
    assert (rows[2]["loss"], rows[2]["reward"], rows[2]["eval"]) == (2.0, 0.5, 0.25)


def test_a_resume_supersedes_the_rows_past_its_step(tmp_path):
    first = role(tmp_path)
    monitor = Monitor(first)
    for step in range(1, 6):
        monitor.log(step, {"loss": 10.0 + step})
    monitor.close()
    second = role(tmp_path, attempt=2, checkpoint=checkpoint(first, 3))
    monitor = Monitor(second)
    assert losses(second) == {1: 11.0, 2: 12.0, 3: 13.0}
    monitor.log(4, {"loss": 24.0})
    monitor.close()
    Monitor(second).close()  # a role that restarts within the attempt takes nothing back
    assert losses(second) == {1: 11.0, 2: 12.0, 3: 13.0, 4: 24.0}


def test_an_attempt_from_the_start_supersedes_everything(tmp_path):
    monitor = Monitor(role(tmp_path))
    monitor.log(1, {"loss": 1.0})
    monitor.close()
    Monitor(role(tmp_path, attempt=2)).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == {}


def test_a_torn_last_line_is_not_read_and_does_not_spoil_the_next(tmp_path):
    it = role(tmp_path)
    monitor = Monitor(it)
    monitor.log(1, {"loss": 1.0})
    monitor.close()
    with it.paths.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    assert losses(it) == {1: 1.0}
    monitor = Monitor(it)
    monitor.log(2, {"loss": 2.0})
    monitor.close()
    assert losses(it) == {1: 1.0, 2: 2.0}


def test_no_metrics_file_is_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == {}


def test_missing_wandb_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"prime-hpc\[wandb\]"):
        Monitor(role(tmp_path, monitor=MonitorConfig(wandb="offline")))


def test_wandb_online_wants_its_key_in_the_environment(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="WANDB_API_KEY"):
        Monitor(role(tmp_path, monitor=MonitorConfig(wandb="online")))


def test_wandb_is_told_what_a_run_belongs_to(tmp_path, monkeypatch):
    told = {}

    def init(**given):
        told.update(given)
        return SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda: None)

    def of(folder, **options):
        folder.mkdir()
        Monitor(role(folder, monitor=MonitorConfig(wandb="offline", **options))).close()
        return told["id"], told["group"], told["tags"], told["notes"]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert of(tmp_path / "alone") == ("run-a", None, None, None)
    named = {"wandb_group": "mine", "wandb_tags": ["a", "b"], "wandb_notes": "a longer context"}
    assert of(tmp_path / "named", **named) == ("run-a", "mine", ["a", "b"], "a longer context")
    sweep = tmp_path / "sweep-7"
    sweep.mkdir()
    (sweep / "sweep.json").write_text("{}")
    assert of(sweep / "0_seed-1") == ("sweep-7.run-a", "sweep-7", None, None)
    assert of(sweep / "1_seed-2", wandb_group="mine") == ("sweep-7.run-a", "mine", None, None)


@pytest.mark.parametrize(("level", "heard"), [("info", logging.WARNING), ("debug", logging.NOTSET)])
def test_libraries_tell_every_request_only_where_all_is_wanted(tmp_path, level, heard):
    role(tmp_path, monitor=MonitorConfig(log_level=level)).quieten(f"talkative_{level}")
    assert logging.getLogger(f"talkative_{level}").level == heard


@pytest.mark.slow
def test_wandb_offline_writes_a_run_of_the_run_s_name(tmp_path):
    pytest.importorskip("wandb")
    options = MonitorConfig(wandb="offline", wandb_group="g", wandb_tags=["a"], wandb_notes="n")
    it = role(tmp_path, monitor=options)
    monitor = Monitor(it)
    monitor.log(1, {"loss": 0.5, "kl": float("nan")})
    monitor.close()
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-run-a.wandb"))) == 1
    assert losses(it) == {1: 0.5}


def test_reward_curve_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    it = role(tmp_path)
    monitor = Monitor(it)
    for step in range(1, 8):
        monitor.log(step, {"train/all/reward": step / 10})
    monitor.close()
    drawn = draw_reward_curve(it.paths.metrics, tmp_path / "curve.png", "run-a")
    assert drawn == tmp_path / "curve.png"
    assert drawn.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_or_rewards_there_is_no_curve(tmp_path, monkeypatch, caplog):
    it = role(tmp_path)
    monitor = Monitor(it)
    monitor.log(1, {"loss": 1.0})
    with caplog.at_level(logging.INFO):
        assert draw_reward_curve(it.paths.metrics, tmp_path / "curve.png", "run-a") is None
        monitor.log(1, {"train/all/reward": 1.0})
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert draw_reward_curve(it.paths.metrics, tmp_path / "curve.png", "run-a") is None
    monitor.close()
    assert "has no train/all/reward" in caplog.text
    assert "prime-hpc[plot]" in caplog.text
    assert not (tmp_path / "curve.png").exists()
