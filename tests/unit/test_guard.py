"""Limits on metrics: what is noticed, what follows, and who says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cluster import control, secrets
from prime_hpc.cluster.live import read_live
from prime_hpc.cluster.role import Role
from prime_hpc.commands import status, tune
from prime_hpc.config.checks import find_conflicts
from prime_hpc.config.compose import compose_run
from prime_hpc.config.schema import parse, to_dict
from prime_hpc.errors import ConfigurationError
from prime_hpc.launchers.view import PlainView
from prime_hpc.observe.guard import read_warnings
from prime_hpc.observe.monitor import Monitor
from prime_hpc.observe.snapshot import take_snapshot
from prime_hpc.plan.run_plan import ProcessPlan, RunPlan
from tests.unit.run_dirs import RunDir

HIGH = "mismatch/abs_mean = 0.83 at step 3, above 0.5 for 3 values in a row"


@pytest.fixture
def role(tmp_path: Path) -> Callable[..., Role]:
    def make(mode: str = "rl", **guard: Any) -> Role:
        secrets.create(tmp_path)
        process = ProcessPlan(name="orchestrator-0", component="orchestrator", index=0, node=0, command=[], log="")
        (tmp_path / "rendezvous" / "control").mkdir(parents=True)
        plan = RunPlan(name="run", run_dir=str(tmp_path), attempt=1, nodes=1, forks=[], checkpoint=None,
                       processes=[process], config=to_dict(parse({"mode": mode, "guard": guard})))  # fmt: skip
        (tmp_path / "plan.json").write_bytes(plan.dump())
        return Role(plan, process)

    return make


def log(monitor: Monitor, metric: str, *values: float, first: int = 1) -> None:
    for step, value in enumerate(values, first):
        monitor.log(step, {metric: value})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage().removeprefix("guard: ") for r in caplog.records if r.getMessage().startswith("guard: ")]


def test_what_stays_past_its_limit_is_said_once_and_stands_until_it_is_over(role, caplog) -> None:
    run = role(**{"mismatch/abs_mean": {"above": 0.5, "steps": 3}})
    monitor = Monitor(run)
    log(monitor, "mismatch/abs_mean", 0.9, 0.9, 0.5, 0.9, 0.9)
    assert said(caplog) == [] and read_warnings(run.paths) == []
    log(monitor, "mismatch/abs_mean", 0.9, 0.8, first=6)
    assert said(caplog) == ["mismatch/abs_mean = 0.9 at step 6, above 0.5 for 3 values in a row"]
    assert read_warnings(run.paths) == ["mismatch/abs_mean = 0.8 at step 7, above 0.5 for 4 values in a row"]
    monitor.log(8, {"loss": 0.1})
    assert len(read_warnings(run.paths)) == 1, "a row without the metric says nothing of it"
    log(monitor, "mismatch/abs_mean", 0.1, first=9)
    assert read_warnings(run.paths) == [] and not read_live(run.paths.live).paused


def test_usual_limits_hold_beside_those_of_a_run_and_null_removes_one(role, caplog) -> None:
    monitor = Monitor(role(**{"train/all/truncated": None, "reward": {"below": 0}}))
    log(monitor, "train/all/truncated", 1, 1, 1, 1)
    log(monitor, "entropy", *[0.01] * 10)
    log(monitor, "mismatch/abs_mean", 0.3, float("nan"), 0.3)
    log(monitor, "optim/grad_norm", float("inf"))
    log(monitor, "reward", -1)
    assert said(caplog)[-4:] == [
        "entropy = 0.01 at step 10, below 0.02 for 10 values in a row",
        "mismatch/abs_mean = 0.3 at step 3, above 0.2 for 3 values in a row",
        "optim/grad_norm = null at step 1, not finite",
        "reward = -1 at step 1, below 0",
    ]


def test_a_fine_tuning_may_become_sure_of_itself(role, caplog) -> None:
    monitor = Monitor(role("sft"))
    log(monitor, "entropy", *[0.001] * 12)
    assert said(caplog) == []


def test_a_pause_says_why_and_counts_anew_once_it_is_over(role, caplog, capsys) -> None:
    run = role(**{"mismatch/abs_mean": {"above": 0.5, "steps": 3, "action": "pause"}})
    monitor = Monitor(run)
    log(monitor, "mismatch/abs_mean", 0.7, 0.8, 0.83)
    assert (read_live(run.paths.live).paused, read_live(run.paths.live).why) == (True, HIGH)
    assert tune.main([str(run.paths.root), "optimizer.lr=1e-7"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"paused = true since {HIGH}"
    assert tune.main([str(run.paths.root), "paused=false"]) == 0
    assert (read_live(run.paths.live).paused, read_live(run.paths.live).why) == (False, "")
    log(monitor, "mismatch/abs_mean", 0.9, 0.9, first=4)
    assert not read_live(run.paths.live).paused
    log(monitor, "mismatch/abs_mean", 0.9, first=6)
    assert read_live(run.paths.live).paused


def test_values_before_the_end_of_a_pause_do_not_count_after_it(role) -> None:
    run = role(loss={"above": 5, "steps": 3, "action": "pause"})
    monitor = Monitor(run)
    log(monitor, "loss", 9, 9, 9, 9, 9)  # the last two are of batches that were sampled before
    assert read_live(run.paths.live).paused
    tune.main([str(run.paths.root), "paused=false"])
    log(monitor, "loss", 9, 9, first=6)
    assert not read_live(run.paths.live).paused and read_warnings(run.paths) == []
    log(monitor, "loss", 9, first=8)
    assert read_live(run.paths.live).why == "loss = 9 at step 8, above 5 for 3 values in a row"


def test_a_stop_asks_for_a_drain(role) -> None:
    run = role("sft", loss={"above": 5, "action": "stop"})
    log(Monitor(run), "loss", 1, 9)
    (request,) = control.take(run.paths.control)
    assert (request.action, request.words) == ("drain", "the guard asked: loss = 9 at step 2, above 5")


def test_metrics_that_do_not_come_are_told_with_the_nearest(role, caplog) -> None:
    unknown = {"mismatch/absmean": {"above": 1}, "eval/words/reward": {"below": 0.1}, "entropy": {"below": 0}}
    run = role(**unknown)
    monitor = Monitor(run)
    for step in range(1, 8):
        monitor.log(step, {"mismatch/abs_mean": 0.0, "entropy": 1.0})
    assert said(caplog) == ["no row has had the metric 'mismatch/absmean' yet; did you mean 'mismatch/abs_mean'?"]
    assert read_warnings(run.paths) == said(caplog)
    monitor.log(8, {"mismatch/absmean": 0.5})
    assert read_warnings(run.paths) == [], "it came after all"


def test_metrics_that_come_now_and_then_and_rows_of_evaluations_alarm_nobody(role, caplog) -> None:
    names = ("val/loss", "errors/environment", "cancelled/stale", "dropped/stale", "update/canary", "late")
    monitor = Monitor(role(**{name: {"above": 1} for name in names}))
    for source in range(6):
        monitor.log(0, {f"eval/{source}/reward": 1.0})
    for step in range(1, 5):
        monitor.log(step, {"loss": 1.0})
    assert said(caplog) == []
    monitor.log(5, {"loss": 1.0})
    assert said(caplog) == ["no row has had the metric 'late' yet"]


def test_a_process_that_starts_again_counts_anew(role) -> None:
    run = role(loss={"above": 5})
    log(Monitor(run), "loss", 9)
    assert read_warnings(run.paths) == ["loss = 9 at step 1, above 5"]
    Monitor(run)
    assert read_warnings(run.paths) == []


def test_what_a_mode_cannot_do_and_what_is_no_limit_is_refused() -> None:
    def problems(mode: str, guard: str) -> dict[str, str]:
        config = compose_run(["+experiment=reverse_text_cpu", f"mode={mode}", f"guard={guard}"])
        return {p.key: p.expected for p in find_conflicts(config) if p.key.startswith("guard")}

    pause = "{loss: {above: 1, action: pause}}"
    assert problems("rl", pause) == {}
    assert problems("sft", pause) == {"guard.loss.action": "warn or stop, which is all that mode=sft can do"}
    assert problems("serve", pause) == {"guard": "no limit, since mode=serve writes no metrics"}
    assert problems("rl", "{train/all/reward: {above: 1, below: 2}}") == {
        "guard.train/all/reward.below": "less than above = 1"
    }
    with pytest.raises(ConfigurationError, match=r"guard.entropy.abov = 1: .* above, below, .*did you mean 'above'"):
        compose_run(["+experiment=reverse_text_cpu", "guard={entropy: {abov: 1}}"])


def test_console_status_and_doctor_say_what_holds_the_run_back_and_how_it_goes_on(role, tmp_path, capsys) -> None:
    directory = RunDir(tmp_path)
    directory.lease(at=19)
    directory.step(3, at=18, **{"train/all/reward": 0.5})
    monitor = Monitor(role(**{"mismatch/abs_mean": {"above": 0.5, "steps": 3, "action": "pause"}}))
    directory.configure()
    log(monitor, "mismatch/abs_mean", 0.7, 0.8, 0.83)
    on = f"python -m prime_hpc.commands.tune {tmp_path} paused=false"

    lines: list[str] = []
    view = PlainView(None)
    view.say = lines.append
    for _ in range(2):
        view.show(take_snapshot(directory.paths, []))
    assert lines == [f"paused, since {HIGH}; to go on: {on}", f"warning: {HIGH}"]

    facts = directory.facts(now=20)
    shown = status.take_status(facts)
    assert (shown.paused, shown.warnings) == (f"{HIGH}; to go on: {on}", [HIGH])
    found = directory.diagnose(now=20)
    assert (found.verdict, found.cause, found.exit_status) == ("failed", "guard", 1)
    assert HIGH in found.headline and on in found.remedy and f"warning: {HIGH}" in found.notes

    assert tune.main([str(tmp_path), "paused=true"]) == 0 and tune.main([str(tmp_path), "paused=false"]) == 0
    healthy = directory.diagnose(now=20)
    assert healthy.verdict == "healthy" and f"warning: {HIGH}" in healthy.notes
    tune.main([str(tmp_path), "paused=true"])
    assert directory.diagnose(now=20).headline.endswith(f"paused, since `tune` asked; to go on: {on}")
    directory.paths.live.write_text("paused")
    assert status.take_status(directory.facts(now=20)).paused == "", "the orchestrator says that it is spoilt"

    directory.event("complete", at=30, reason=f"drained: the guard asked: {HIGH}")
    left = directory.diagnose(now=40)
    assert (left.cause, left.headline) == ("guard", f"the guard held the run back: {HIGH}")
