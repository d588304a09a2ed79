"""The commands, called as from a shell: what they print, write and return."""

import json
import time
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from prime_hpc.cluster.files import write_json
from prime_hpc.cluster.memory import oom_kills
from prime_hpc.commands import doctor, logs, resume, status, stop
from prime_hpc.config.run import RunConfig
from prime_hpc.config.schema import to_dict
from prime_hpc.errors import InfrastructureFailure
from tests.unit.run_dirs import START, RunDir, clocks


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "mine")


def revive(run: RunDir) -> None:
    """Give the run a supervisor at work now."""
    run.lease(at=time.time() - START)


@pytest.mark.parametrize("verb", ["doctor", "logs", "resume", "status", "stop"])
def test_short_names_are_the_same_commands(verb: str) -> None:
    assert import_module(f"prime_hpc.{verb}").main is import_module(f"prime_hpc.commands.{verb}").main


def test_doctor_prints_headline_evidence_and_remedy(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.failed("trainer-1", "MemoryError: no more", at=50)
    run.failed("trainer-0", "RuntimeError: gloo: Connection closed by peer", at=51)
    assert doctor.main([str(run.paths.root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trainer-1 ran out of host memory"
    assert lines[1].startswith("mine, attempt 1 | ") and lines[1].endswith("| trainer rank 1 | exit code 1")
    assert "  logs/attempt_1/trainer-1.log:4  MemoryError: no more" in lines
    assert "  events.jsonl:1  trainer-1: exit with exit code 1" in lines
    assert lines[lines.index("failed after it:") + 1] == "  trainer-0: peer lost, +1.0 s"


def test_doctor_as_json(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.event("complete", at=9)
    assert doctor.main([str(run.paths.root), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["verdict"], answer["cause"], answer["evidence"]) == ("complete", None, [])


@pytest.mark.parametrize("command", [doctor, logs, resume, status, stop])
def test_a_directory_without_a_run_is_refused(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path)]) == 2
    assert "expected a run directory, with a plan.json" in capsys.readouterr().err


def test_status_says_how_long_the_run_took_to_its_first_step(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(
        run.paths.startup, {"queued_s": 3.0, "seconds": {"supervisor": 1.25, "trainer": 20.0, "first step": 31.5}}
    )
    assert status.main([str(run.paths.root)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "first step after 31.5 s (supervisor 1.2, trainer 20.0)"


def test_status_is_a_row_a_component(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    revive(run)
    now = time.time() - START
    run.step(11, at=now - 40, **{"train/all/reward": 0.25, "perf/tokens_per_s": 1000.0})
    run.step(12, at=now - 4, **{"perf/tokens_per_s": 1234.5, "perf/rollout_tokens_per_s": 300.0})
    run.record("trainer-0", "training", at=now)
    run.record("trainer-1", "training", at=now)
    run.record("orchestrator-0", "sampling", at=now)
    run.log("trainer-1", "", at=now, restart=2)
    run.beat("trainer-0", at=now, wait=("all_reduce", "trainer-1", now - 7, 600))
    run.beat("trainer-1", at=now, wait=("batch 13", "orchestrator-0", now - 12, 3600))
    assert status.main([str(run.paths.root)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    head = " ".join(lines[: lines.index("")])
    assert head == ("mine, attempt 1: running, step 12 of 90 | reward 0.25 | trained tokens/s 1234 | sampled "
                    "tokens/s 300 | last progress 4 s ago")  # fmt: skip
    assert lines[lines.index("") + 1 :][:2] == ["component processes state restarts longest wait",
                                               "orchestrator 1 1 sampling 0 -"]  # fmt: skip
    trainer = " ".join(lines[lines.index("") + 5 :])
    assert trainer == "trainer 2 2 training 2 trainer-1: batch 13 from orchestrator-0, 12 of 3600 s"


def test_status_says_why_the_run_pauses_or_did(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.record("orchestrator-0", "paused", at=5, paused="60% of the last 20 episodes of words failed")
    assert status.main([str(run.paths.root)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "paused, since 60% of the last 20 episodes of words failed"


def test_status_has_the_figures_of_the_last_evaluation(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(4, at=4, **{"eval/held_out/reward": 0.5, "eval/held_out/pass@4": 0.75})
    run.step(5, at=5)
    assert status.main([str(run.paths.root)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "evaluated held_out: reward 0.5, pass@4 0.75"


def test_status_as_json_has_every_process(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.record("env-words-0", "ready", at=5)
    run.beat("env-words-0", at=6, doing="8 rollouts")
    assert status.main([str(run.paths.root), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["phase"], answer["step"], answer["reward"]) == ("ended", 0, None)
    assert answer["processes"][1] == {"name": "env-words-0", "component": "environment", "state": "ready",
                                      "restarts": 0, "doing": "8 rollouts", "wait": None}  # fmt: skip
    assert answer["processes"][0]["state"] == "waiting"


def test_watch_ends_with_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    revive(run)
    periods: list[float] = []

    def sleep(seconds: float) -> None:
        periods.append(seconds)
        run.event("complete", at=time.time() - START)

    monkeypatch.setattr(status.time, "sleep", sleep)
    assert status.main([str(run.paths.root), "--watch"]) == 0
    assert periods == [status.PERIOD_S]


def test_logs_are_merged_by_time(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.log("trainer-0", "<10> INFO    trainer-0 b\nTraceback\n<30> INFO    trainer-0 e\n", at=30)
    engine = "no clock yet\n(EngineCore pid=2) INFO 11-18 <5> [core.py:1] a\nINFO 11-18 <20> [x.py:1] c\n"
    run.log("inference-0", engine, at=20)
    run.log("trainer-1", "[rank1]:[E1118 <25>.123 socket.cpp:1] d\n", at=25)
    assert logs.main([str(run.paths.root)]) == 0
    assert capsys.readouterr().out == clocks(
        "inference-0 no clock yet\n"
        "inference-0 (EngineCore pid=2) INFO 11-18 <5> [core.py:1] a\n"
        "trainer-0 <10> INFO    trainer-0 b\n"
        "trainer-0 Traceback\n"
        "inference-0 INFO 11-18 <20> [x.py:1] c\n"
        "trainer-1 [rank1]:[E1118 <25>.123 socket.cpp:1] d\n"
        "trainer-0 <30> INFO    trainer-0 e\n"
    )


def test_logs_before_midnight_come_first(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    midnight = 86_400 - (START + time.localtime(START).tm_gmtoff) % 86_400
    run.log("trainer-0", f"<{midnight - 7200}> z\n<{midnight - 60}> a\n<{midnight + 60}> c\n", at=midnight + 61)
    run.log("trainer-1", f"<{midnight - 30}> b\n<{midnight + 90}> d\n", at=midnight + 91)
    assert logs.main([str(run.paths.root)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["z", "a", "b", "c", "d"]


def test_logs_of_one_process_and_of_an_earlier_attempt(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.log("trainer-0", "0%|  | 0/2\r50%|x | 1/2\r100%|xx| 2/2\nfirst\n", at=1)
    run.log("trainer-0", "restarted\n", at=2, restart=1)
    RunDir(run.paths.root, attempt=2).log("trainer-0", "second\n", at=3)
    assert logs.main([str(run.paths.root), "--process", "trainer-0", "--attempt", "1"]) == 0
    assert capsys.readouterr().out == "100%|xx| 2/2\nfirst\nrestarted\n"
    assert logs.main([str(run.paths.root)]) == 0
    assert capsys.readouterr().out == "trainer-0 second\n"


def test_logs_of_an_unknown_process(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.main([str(run.paths.root), "--process", "trainer-2"]) == 2
    assert "did you mean 'trainer-" in capsys.readouterr().err


def test_follow_goes_on_until_the_run_has_ended(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    revive(run)
    path = run.log("trainer-0", "".join(f"old {i}\n" for i in range(12)), at=1)

    def later(_: float) -> None:
        with path.open("a") as file:
            file.write("new\nhalf a li")
        run.log("trainer-0", "restarted\n", at=2, restart=1)
        run.event("complete", at=time.time() - START)

    monkeypatch.setattr(logs.time, "sleep", later)
    rows = [text for _, text in logs.follow(run.paths.root, 1, ["trainer-0"])]
    assert rows == [*(f"old {i}" for i in range(2, 12)), "new", "restarted"]


def test_stop_asks_the_supervisor_and_waits_for_the_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    revive(run)
    asked: list[dict] = []

    def supervise(_: float) -> None:
        (request,) = (run.paths.rendezvous / "control").iterdir()
        asked.append(json.loads(request.read_text()))
        run.event("interrupted", at=time.time() - START)

    monkeypatch.setattr(stop.time, "sleep", supervise)
    monkeypatch.setenv("LOGNAME", "ada")
    assert stop.main([str(run.paths.root), "--why", "wrong data"]) == 0
    (request,) = asked
    assert abs(request.pop("time") - time.time()) < 60
    assert request == {"action": "stop", "unit": None, "why": "wrong data", "by": "ada", "goes_on": False}


def test_drain_without_waiting(run: RunDir) -> None:
    revive(run)
    assert stop.main([str(run.paths.root), "--drain", "--no-wait"]) == 0
    (request,) = (run.paths.rendezvous / "control").iterdir()
    assert request.suffix == ".json" and json.loads(request.read_text())["action"] == "drain"


def test_a_run_that_does_not_work_cannot_be_stopped(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.lease(at=5)
    assert stop.main([str(run.paths.root)]) == 2
    assert "there is nothing to stop" in capsys.readouterr().err
    assert not (run.paths.rendezvous / "control").exists()


def test_resume_launches_the_saved_configuration_again(run: RunDir, tmp_path: Path) -> None:
    saved = to_dict(RunConfig(max_steps=90))
    run.paths.config.write_text(yaml.safe_dump(saved))
    arguments = resume.launch_arguments(run.paths.root, ["max_steps=200", "resume=20"], tmp_path / "conf")
    assert arguments == ["--config-dir", str(tmp_path / "conf"), "+experiment=attempt_1", "run.name=mine",
                         f"run.output_dir={tmp_path}", "resume=latest", "max_steps=200", "resume=20"]  # fmt: skip
    text = (tmp_path / "conf" / "experiment" / "attempt_1.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    assert yaml.safe_load(text) == saved


def test_a_choice_on_resume_replaces_the_saved_section(run: RunDir, tmp_path: Path) -> None:
    saved = to_dict(RunConfig())
    saved["launcher"].update(name="dry_run", target="local")
    run.paths.config.write_text(yaml.safe_dump(saved))
    resume.launch_arguments(run.paths.root, ["launcher=local"], tmp_path)
    assert "launcher" not in yaml.safe_load((tmp_path / "experiment" / "attempt_1.yaml").read_text())
    resume.launch_arguments(run.paths.root, [], tmp_path)
    assert yaml.safe_load((tmp_path / "experiment" / "attempt_1.yaml").read_text())["launcher"]["name"] == "local"


def test_a_run_at_work_is_not_resumed(run: RunDir, tmp_path: Path) -> None:
    revive(run)
    with pytest.raises(InfrastructureFailure, match="attempt 1 of .* is at work; python -m prime_hpc.stop"):
        resume.launch_arguments(run.paths.root, [], tmp_path)


V1 = "8:pids:/\n4:memory:/job/step\n0::/\n"
V2 = "0::/slurm/job_7/step_0\n"


@pytest.mark.parametrize(
    "own, file, text, kills",
    [
        (V1, "memory/job/step/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        (V1, "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", 1),
        (V2, "slurm/job_7/step_0/memory.events", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n", 2),
        (V2, "memory.events", "oom_kill 5\n", 5),
        (V2, "memory/memory.oom_control", "oom_kill 5\n", None),
    ],
)
def test_kills_by_the_kernel_are_counted(own: str, file: str, text: str, kills: int | None, tmp_path: Path) -> None:
    (tmp_path / "self").write_text(own)
    (tmp_path / "root" / file).parent.mkdir(parents=True)
    (tmp_path / "root" / file).write_text(text)
    assert oom_kills(tmp_path / "self", tmp_path / "root") == kills
