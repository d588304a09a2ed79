"""Launching for Slurm without one: dry runs, submissions to commands that only note what they are told, and tasks."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prime_hpc.cluster.control import take
from prime_hpc.config.schema import parse
from prime_hpc.errors import InfrastructureFailure
from prime_hpc.launchers.prepare import RunStart
from prime_hpc.launchers.registry import launch_plan
from prime_hpc.launchers.slurm.executor import find, submit, submit_missing
from prime_hpc.launchers.slurm.sbatch import render_scripts
from prime_hpc.launchers.slurm.task import RoleTask
from prime_hpc.plan.build import Attempt, build_plan
from prime_hpc.plan.run_plan import RunPlan, load
from tests.integration.test_bad_input import files, launch

GIVEN = ("cluster.gpus_per_node=0", "trainer.ranks=1", "env.workers=1", "env.train=[{id: prime_hpc.envs.reverse_text}]")


def make_plan(root: Path, launcher: str) -> RunPlan:
    config = parse(OmegaConf.to_container(OmegaConf.from_dotlist([f"launcher.name={launcher}", *GIVEN])))
    plan = build_plan(config, root, Attempt(), gpus=0)
    (root / "logs" / "attempt_1").mkdir(parents=True)
    (root / "plan.json").write_bytes(plan.dump())
    return plan


def test_a_dry_run_writes_config_plan_and_script_and_submits_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "+experiment=glm5_swe", "model.path=/absent", "run.name=dry", "launcher=dry_run")
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "outputs" / "dry") == ["config.yaml", "job.sbatch", "plan.json"]
    plan = load(tmp_path / "outputs" / "dry" / "plan.json")
    assert plan.nodes == 49
    assert (tmp_path / "outputs" / "dry" / "job.sbatch").read_text() == render_scripts(plan)["job.sbatch"]
    assert "not checked: /absent/config.json is not here" in done.stdout
    assert "nothing was started" in done.stdout.replace("\n", " ")


def test_a_dry_run_for_another_launcher_than_the_experiments(tmp_path: Path, tiny_model: Path) -> None:
    done = launch(tmp_path, "+experiment=reverse_text_cpu", f"model.path={tiny_model}", "run.name=dry",
                  "launcher=dry_run", "launcher.target=slurm_linked", "cluster.gpus_per_node=0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "outputs" / "dry") == ["config.yaml", "job.inference.sbatch", "job.sbatch", "plan.json"]


def test_without_slurm_a_submission_leaves_no_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    arguments = ("+experiment=reverse_text_cpu", f"model.path={tiny_model}", "run.name=mine", "launcher=slurm_hetjob",
                 "cluster.gpus_per_node=0")  # fmt: skip
    done = launch(tmp_path, *arguments)
    assert done.returncode == 1
    assert "InfrastructureFailure: there is no sbatch on this machine" in done.stderr
    assert files(tmp_path / "outputs") == [], "the name is still free"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands as scripts that note their arguments in `calls`; job ids count from 41."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    calls.touch()
    for name, answer in {"sbatch": f'echo "Submitted batch job $((40 + $(grep -c sbatch {calls})))"', "srun": "true",
                         "scancel": "true"}.items():  # fmt: skip
        script = folder / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n{answer}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return calls


def test_a_hetjob_is_one_submission(tmp_path: Path, commands: Path) -> None:
    plan = make_plan(tmp_path / "run", "slurm_hetjob")
    job = submit(plan)
    root = tmp_path / "run"
    assert commands.read_text() == f"sbatch {root}/job.sbatch\n"
    assert job.job_id == "41" and find(plan).job_ids == ["41"]
    assert (root / "slurm" / "41_submission.sh").read_text() == (root / "job.sbatch").read_text()
    for process in plan.processes:
        pickle = job.process(process.name).paths.submitted_pickle
        assert pickle.resolve() == root / "slurm" / "41_submitted.pkl"
    assert job.process("trainer-0").submission().function == RoleTask(root / "plan.json")


def test_linked_jobs_are_submitted_and_cancelled_together(tmp_path: Path, commands: Path) -> None:
    job = submit(make_plan(tmp_path / "run", "slurm_linked"))
    job.cancel()
    root = tmp_path / "run"
    assert commands.read_text().splitlines() == [
        f"sbatch {root}/job.sbatch",
        f"sbatch --dependency=after:41 --kill-on-invalid-dep=yes {root}/job.inference.sbatch",
        "scancel 41 42",
    ]
    assert (job.process("trainer-0").job_id, job.process("inference-0").job_id) == ("41", "42")


@pytest.mark.parametrize(("state", "ids"), [("RUNNING", ["41", "42"]), ("TIMEOUT", ["41", "43"]), ("", ["41", "43"])])
def test_a_linked_job_that_has_ended_is_submitted_again(
    state: str, ids: list[str], tmp_path: Path, commands: Path
) -> None:
    plan = make_plan(tmp_path / "run", "slurm_linked")
    submit(plan)
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\necho 42 {state}\n" if state else "#!/bin/sh\nexit 1\n")
    squeue.chmod(0o755)
    plan.attempt = 2
    submit_missing(plan)
    assert json.loads((tmp_path / "run" / "job.json").read_text()) == {"attempt": 2, "job_ids": ids}
    again = [line for line in commands.read_text().splitlines()[2:] if line.startswith("sbatch")]
    assert again == [f"sbatch {tmp_path}/run/job.inference.sbatch"] * (ids[1] == "43")


def test_what_sbatch_says_is_told_and_earlier_jobs_are_cancelled(tmp_path: Path, commands: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(
        sbatch.read_text() + f"test $(grep -c sbatch {commands}) = 1 || {{ echo no nodes >&2; exit 1; }}\n"
    )
    with pytest.raises(InfrastructureFailure, match=r"^job\.inference\.sbatch was not submitted: [^$]*no nodes"):
        submit(make_plan(tmp_path / "run", "slurm_linked"))
    assert commands.read_text().splitlines()[-1] == "scancel 41"


NO_CLUSTER = """sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: fatal: Could not establish a configuration source"""
DOWN = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize("words", [NO_CLUSTER, DOWN])
def test_a_slurm_that_does_not_answer_is_told_once_and_leaves_nothing(
    words: str, tmp_path: Path, commands: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\necho '{words}' >&2; exit 1\n")
    config = parse(OmegaConf.to_container(OmegaConf.from_dotlist([
        "launcher.name=slurm_single", f"run.output_dir={tmp_path}", "run.name=mine", *GIVEN])))  # fmt: skip
    start = RunStart.resolve(config, experiment=None, origins=[])
    with pytest.raises(InfrastructureFailure) as caught:
        launch_plan(start)
    assert str(caught.value) == (f"Slurm does not answer here: {words.splitlines()[0]}; launcher=dry_run writes the "
                                 "files of the run without it")  # fmt: skip
    assert "sbatch" not in capfd.readouterr().err
    assert not start.paths.root.exists()
    start.paths.root.mkdir()  # as a dry run leaves it
    with pytest.raises(InfrastructureFailure):
        launch_plan(start)
    assert files(start.paths.root / "logs") == [] and start.paths.config.exists()


def run_task(root: Path, code: str) -> subprocess.Popen:
    """Start a task whose process runs `code` in place of the trainer."""
    plan = make_plan(root, "slurm_hetjob")
    plan.process("trainer-0").command = [sys.executable, "-c", code]
    (root / "plan.json").write_bytes(plan.dump())
    env = {**os.environ, "PRIME_HPC_UNIT": "trainer", "SLURM_PROCID": "0", "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "3",
           "SUBMITIT_FOLDER": str(root), "SUBMITIT_EXECUTOR": "slurm"}  # fmt: skip
    (root / "41_0_result.pkl").write_text("of an earlier try")
    call = ("import sys; from pathlib import Path; from prime_hpc.launchers.slurm.task import RoleTask; "
            "print(RoleTask(Path(sys.argv[1]))())")  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", call, str(root / "plan.json")], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def test_a_task_runs_its_process_and_logs_to_its_file(tmp_path: Path) -> None:
    task = run_task(tmp_path / "run", "print('hello')")
    output, errors = task.communicate(timeout=300)
    assert task.returncode == 0, errors
    assert "'process': 'trainer-0'" in output
    assert (tmp_path / "run" / "logs" / "attempt_1" / "trainer-0.log").read_text() == "hello\n"
    assert not (tmp_path / "run" / "41_0_result.pkl").exists()


def test_a_task_tells_how_its_process_failed(tmp_path: Path) -> None:
    record = {"process": "trainer-0", "attempt": 1, "error": "CorruptData: bad shard"}
    code = f"import pathlib; p = pathlib.Path({str(tmp_path)!r}, 'run/rendezvous'); p.mkdir(); " + (
        f"(p / 'trainer-0.json').write_text({json.dumps(json.dumps(record))}); raise SystemExit(3)")  # fmt: skip
    _, errors = run_task(tmp_path / "run", code).communicate(timeout=300)
    assert "InfrastructureFailure: trainer-0 ended with exit code 3 on " in errors
    assert f": CorruptData: bad shard; see {tmp_path}/run/logs/attempt_1/trainer-0.log" in errors


def start_sleeper(root: Path) -> subprocess.Popen:
    """A task whose process has started and will sleep."""
    task = run_task(root, "import time; print('up', flush=True); time.sleep(60)")
    log, deadline = root / "logs" / "attempt_1" / "trainer-0.log", time.monotonic() + 300
    while not log.exists() or not log.read_text():
        assert task.poll() is None and time.monotonic() < deadline, task.communicate()
        time.sleep(0.05)
    return task


def test_a_task_that_the_supervisor_stops_ends_its_process(tmp_path: Path) -> None:
    task = start_sleeper(tmp_path / "run")
    (tmp_path / "run" / "rendezvous").mkdir()
    (tmp_path / "run" / "rendezvous" / "stopping.trainer").touch()
    task.send_signal(signal.SIGTERM)
    _, errors = task.communicate(timeout=300)
    assert "InfrastructureFailure: trainer-0 was killed by SIGTERM on " in errors


def test_a_sigterm_to_a_task_that_was_superseded_drains_nothing(tmp_path: Path) -> None:
    task = start_sleeper(tmp_path / "run")
    (tmp_path / "run" / "rendezvous").mkdir()
    (tmp_path / "run" / "rendezvous" / "lease.json").write_text('{"attempt": 2, "beat": 0}')
    task.send_signal(signal.SIGTERM)
    _, errors = task.communicate(timeout=300)
    assert "InfrastructureFailure: trainer-0 was killed by SIGTERM on " in errors
    assert not (tmp_path / "run" / "rendezvous" / "control").exists()


def test_a_sigterm_of_slurm_asks_the_supervisor_to_drain(tmp_path: Path) -> None:
    task = start_sleeper(tmp_path / "run")
    control, deadline = tmp_path / "run" / "rendezvous" / "control", time.monotonic() + 300
    task.send_signal(signal.SIGTERM)
    while not (requests := take(control)):
        assert task.poll() is None and time.monotonic() < deadline, task.communicate()
        time.sleep(0.05)
    assert [(request.action, request.by, request.goes_on) for request in requests] == [("drain", "trainer-0", True)]
    assert task.poll() is None
    task.send_signal(signal.SIGINT)
    task.communicate(timeout=300)
