"""Runs that work, start, end well, recover or hang."""

import json
from pathlib import Path

import pytest

from prime_hpc.errors import ConfigurationError
from prime_hpc.observe.run_facts import read_run
from tests.unit.run_dirs import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "mine")
    made.event("start", at=0)
    return made


def test_a_healthy_run(run: RunDir) -> None:
    run.step(11, at=90)
    run.step(12, at=97)
    run.lease(at=99)
    run.beat("trainer-0", at=99, wait=("batch 13", "orchestrator-0", 98, 3600))
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.verdict, diagnosis.exit_status) == ("healthy", 0)
    assert diagnosis.headline == "nothing is wrong: step 12 of 90, last progress 3 s ago"


WHY = "100% of the last 20 episodes of words failed, more than env.error_budget = 50%; the last one: TaskError: oh"


def test_a_run_that_pauses_is_not_healthy_nor_is_it_once_it_was_stopped(run: RunDir) -> None:
    run.lease(at=19)
    run.record("orchestrator-0", "paused", at=19, paused=WHY)
    paused = run.diagnose(now=20)
    run.event("interrupted", at=21, reason="interrupted, stopping every process")
    for diagnosis in (paused, run.diagnose(now=500)):
        assert (diagnosis.verdict, diagnosis.cause, diagnosis.exit_status) == ("failed", "error budget", 1)
        assert diagnosis.headline == f"too many episodes failed in their environment: {WHY}"
        assert diagnosis.evidence[0].file == "rendezvous/orchestrator-0.json"


def test_a_pause_that_is_over_is_forgotten(run: RunDir) -> None:
    run.lease(at=19)
    run.record("orchestrator-0", "sampling", at=19, paused="")
    assert run.diagnose(now=20).verdict == "healthy"


def test_an_evaluation_alone_has_its_figures_in_place_of_steps(run: RunDir) -> None:
    run.paths.metrics.write_text(json.dumps({"step": 0, "time": 0.0, "eval/held_out/reward": 0.25}) + "\n")
    run.event("complete", at=30)
    assert run.diagnose(now=40).headline == ("nothing is wrong: the run is complete, evaluated held_out: reward 0.25")


def test_a_run_that_starts(run: RunDir) -> None:
    run.lease(at=19)
    for process in ("orchestrator-0", "trainer-0", "trainer-1"):
        run.record(process, "ready", at=10)
    run.record("inference-0", "starting", at=10)
    assert run.diagnose(now=20).headline == (
        "nothing is wrong: no step yet, 3 of 5 processes are up (not yet: env-words-0, inference-0)"
    )


def test_a_complete_run(run: RunDir) -> None:
    run.step(90, at=1000)
    run.event("complete", at=1010)
    diagnosis = run.diagnose(now=5000)
    assert (diagnosis.verdict, diagnosis.exit_status) == ("complete", 0)
    assert diagnosis.headline == "nothing is wrong: the run is complete, step 90 of 90"


def test_the_mark_of_a_complete_run_suffices(run: RunDir) -> None:
    run.record("trainer-0", "done", at=5)
    (run.paths.rendezvous / "complete").touch()
    assert run.diagnose(now=5000).verdict == "complete"


def test_a_complete_run_forgives_what_it_survived(run: RunDir) -> None:
    run.event("exit", at=10, process="inference-0", exit_code=-9)
    run.event("degrade", at=12, unit="inference-0", reason="restarts are used up")
    run.event("complete", at=1010)
    diagnosis = run.diagnose(now=5000)
    assert (diagnosis.verdict, diagnosis.notes) == ("complete", ["inference-0: degrade (restarts are used up)"])


def test_a_unit_that_is_being_restarted_is_named(run: RunDir) -> None:
    run.lease(at=99)
    run.event("exit", at=90, process="inference-0", exit_code=-9)
    run.event("restart", at=91, unit="inference-0", restart=1)
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.verdict, diagnosis.process) == ("failed", "inference-0")
    assert diagnosis.notes == ["inference-0: restart"]
    run.event("recovered", at=99, unit="inference-0", restart=1)
    assert run.diagnose(now=100).verdict == "healthy"


def test_a_wait_past_its_deadline_is_a_hang_of_the_process_at_its_end(run: RunDir) -> None:
    run.lease(at=699)
    run.beat("trainer-0", at=699, wait=("batch 13", "orchestrator-0", 60, 600))
    run.beat("orchestrator-0", at=699, wait=("rollout w-17", "env-words-0", 65, 3600))
    run.beat("env-words-0", at=699, doing="scoring rollout w-17")
    run.log("env-words-0", "<66> INFO    env-words-0 calling sympy\n", at=66)
    assert run.diagnose(now=669).verdict == "healthy"
    diagnosis = run.diagnose(now=700)
    assert (diagnosis.process, diagnosis.cause, diagnosis.exit_status) == ("env-words-0", "hang", 1)
    assert diagnosis.headline == "env-words-0 makes no progress, and others wait for it"
    assert [e.text for e in diagnosis.evidence][:3] == [
        "trainer-0 has waited 640 s for batch 13 from orchestrator-0 (deadline 600 s)",
        "orchestrator-0 has waited 635 s for rollout w-17 from env-words-0 (deadline 3600 s)",
        "env-words-0 waits for nobody; it was last seen 1 s ago, scoring rollout w-17",
    ]
    assert (diagnosis.evidence[3].file, diagnosis.evidence[3].line) == ("logs/attempt_1/env-words-0.log", 1)


def test_a_process_without_a_sign_of_life_hangs(run: RunDir) -> None:
    run.lease(at=699)
    run.beat("trainer-0", at=699, doing="step 3")
    run.beat("trainer-1", at=570, doing="step 3")
    diagnosis = run.diagnose(now=700)
    assert (diagnosis.process, diagnosis.cause) == ("trainer-1", "hang")
    assert diagnosis.evidence[0].text == "trainer-1 waits for nobody; it was last seen 130 s ago, step 3"
    run.record("trainer-1", "done", at=650)
    assert run.diagnose(now=700).verdict == "healthy"


def test_a_torn_event_is_not_read(run: RunDir) -> None:
    run.event("exit", at=10, process="trainer-0", exit_code=-9)
    with (run.paths.root / "events.jsonl").open("a") as file:
        file.write('{"time": 17950000')
    diagnosis = run.diagnose(now=100)
    assert (diagnosis.process, diagnosis.cause) == ("trainer-0", "killed")


def test_an_end_without_any_trace_is_unknown(tmp_path: Path) -> None:
    diagnosis = RunDir(tmp_path / "mine").diagnose(now=100)
    assert (diagnosis.verdict, diagnosis.exit_status) == ("unknown", 2)
    assert diagnosis.headline.startswith("the attempt ended without a failure that its files show")


def test_a_plan_alone_was_never_started(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    for log in run.paths.logs(1).iterdir():
        log.unlink()
    run.paths.logs(1).rmdir()
    assert run.diagnose(now=10).headline == "the run was never started: there is only its plan"


def test_a_directory_that_is_no_run_and_an_attempt_that_never_was(tmp_path: Path) -> None:
    RunDir(tmp_path / "mine")
    with pytest.raises(ConfigurationError, match="with a plan.json; in .* there are mine; did you mean 'mine'"):
        read_run(tmp_path / "mime")
    with pytest.raises(ConfigurationError, match="--attempt = 3: expected one of 1"):
        read_run(tmp_path / "mine", 3)
