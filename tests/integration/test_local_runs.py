"""Whole runs on the fake engine: they end, they do not disturb one another, they resume, they name who failed first."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from prime_hpc.cluster.faults import Fault
from prime_hpc.commands import collect
from prime_hpc.observe.records import read_batch, read_records, record_path
from prime_hpc.orchestrator.journal import BatchCut, read
from prime_hpc.transport.checkpoints import complete_steps
from prime_hpc.transport.messages import PolicyVersion
from prime_hpc.transport.weights import published_versions
from tests.integration.runs import ForkedRun, LocalRun, RunDirectory, launch_forked

SKILL = "inference.engine_args={skill0: 0.4, skill_per_version: 0.01, token_s: 0.002}"


HELD_OUT = ("env.eval.sources=[{id: prime_hpc.envs.reverse_text, name: held_out, args: {seed: 9}, num_tasks: 3, "
            "sampling: {max_tokens: 14}}]")  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[LocalRun, LocalRun]:
    """Two runs at the same time in one folder: one over ZMQ with evaluation, one over files."""
    output = tmp_path_factory.mktemp("outputs")
    evaluated = ("env.eval.every=2", HELD_OUT)
    first = LocalRun(output, tiny_model, "first", "max_steps=4", SKILL, "checkpoint.every=2", *evaluated)
    second = ForkedRun(output, tiny_model, "second", "max_steps=3", SKILL, "orchestrator.transport=files", "seed=7",
                      "inference.replicas=2", "monitor.wandb=offline", f"cluster.scratch={output}",
                      "orchestrator.max_inflight=auto")  # fmt: skip
    for run in (first, second):
        code, text = run.wait()
        assert code == 0, text
        run.text = text
    return first, second


def test_both_runs_end_with_every_step_reported(finished: tuple[LocalRun, LocalRun]) -> None:
    for run, steps in zip(finished, (4, 3), strict=True):
        assert run.summary["steps"] == steps
        assert {r["step"] for r in run.metrics if "loss" in r} == set(range(1, steps + 1))
        assert run.record("trainer-0")["state"] == run.record("orchestrator-0")["state"] == "done"
        assert f"everything lies in {run.root}" in run.text
        assert (run.root / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
        assert not run.survivors()


def test_side_by_side_runs_share_nothing(finished: tuple[LocalRun, LocalRun]) -> None:
    first, second = finished
    assert first.record("inference-0")["base_url"] != second.record("inference-0")["base_url"]
    tasks = [{r["task_id"] for r in read_records(record_path(run.root / "rollouts", 1))} for run in finished]
    assert tasks[0] != tasks[1], "another seed draws other tasks"
    assert (first.root / "model" / "config.json").exists() and (second.root / "model" / "config.json").exists()


def test_processes_of_a_node_load_one_copy_of_the_model(finished: tuple[LocalRun, LocalRun]) -> None:
    [staged] = (finished[1].root.parent / f"prime_hpc-{os.getuid()}").iterdir()
    for process in ("trainer-0", "inference-0", "inference-1"):
        assert f"loads its model from {staged}" in finished[1].log(process)
    assert "loads its model from" not in finished[1].log("orchestrator-0") + finished[0].log("trainer-0")


def test_engines_that_tell_nothing_of_their_load_are_named(finished: tuple[LocalRun, LocalRun]) -> None:
    log = finished[1].log("orchestrator-0")
    for name in ("inference-0", "inference-1"):
        assert f"{name} does not tell the use of its KV cache" in log
    assert "stays at 16 where none tells" in log


def test_evaluations_come_when_due_and_at_the_end(finished: tuple[LocalRun, LocalRun]) -> None:
    evaluated = {r["step"]: r for r in finished[0].metrics if "eval/held_out/reward" in r}
    assert set(evaluated) == {2, 4}
    assert evaluated[4]["eval/held_out/version"] == 4
    assert f"evaluated 4 | eval held out {evaluated[4]['eval/held_out/reward']:.4g}" in finished[0].text


def test_the_end_comes_after_the_last_save_and_evaluation_and_everybody_leaves_alone(
    finished: tuple[LocalRun, LocalRun],
) -> None:
    run = finished[0]
    complete = (run.root / "rendezvous" / "complete").stat().st_mtime
    assert (run.root / "checkpoints" / "step_4" / "manifest.json").stat().st_mtime <= complete
    assert (run.root / "metrics.jsonl").stat().st_mtime <= complete
    assert [event["kind"] for event in run.events] == ["start", "complete"]
    for server in ("inference-0", "env-reverse_text-0"):
        assert "the run is complete, leaving" in run.log(server)


def test_records_hold_ids_versions_and_advantages(finished: tuple[LocalRun, LocalRun]) -> None:
    records = list(read_records(record_path(finished[0].root / "rollouts", 1)))
    assert sum(record["samples"][0]["trained"] for record in records) == 16
    assert len(records) % 4 == 0, "a group whose rewards are all alike is there beside the one in its place"
    for record in records:
        (sample,) = record["samples"]
        assert sample["token_ids"] and record["reward"] in (0.0, 1.0)
        assert {run[0] for run in sample["versions"] if run[0]} <= {"0.0", "0.1"}


def test_checkpoints_and_journal_agree(finished: tuple[LocalRun, LocalRun]) -> None:
    run = finished[0]
    assert complete_steps(run.root / "checkpoints") == [2, 4]
    cut = [r.step for r, _ in read(run.root / "rollouts" / "journal") if isinstance(r, BatchCut)]
    assert cut == [1, 2, 3, 4]


def test_a_stopped_run_leaves_nothing_behind_and_goes_on_where_it_saved(tmp_path: Path, tiny_model: Path) -> None:
    arguments = (SKILL, "checkpoint.every=2", "checkpoint.keep_last=500")
    run = LocalRun(tmp_path, tiny_model, "stopped", "max_steps=500", *arguments)
    run.wait_for_step(6)
    run.process.send_signal(signal.SIGINT)
    code, text = run.wait()
    assert code == 130
    assert not run.survivors()
    saved = complete_steps(run.root / "checkpoints")
    assert saved, "a save waits for the one before it: that of step 2 is over"
    onward = f"to go on from step {saved[-1]}: python -m prime_hpc.resume {run.root}"
    assert text.endswith(f"stopped: interrupted by Ctrl-C; {onward}\n")

    again = ForkedRun(tmp_path, tiny_model, "stopped", f"max_steps={saved[-1] + 4}", "resume=latest", *arguments)
    code, text = again.wait()
    assert code == 0, text
    assert f"resumes {run.root}/checkpoints/step_{saved[-1]}" in text.replace("\n", "")
    assert again.summary["steps"] == saved[-1] + 4
    rows = [r["step"] for r in again.metrics if "loss" in r]
    assert rows[-4:] == list(range(saved[-1] + 1, saved[-1] + 5))
    cut = [r.step for r, _ in read(run.root / "rollouts" / "journal") if isinstance(r, BatchCut)]
    assert cut == list(range(1, saved[-1] + 5)), "no batch is cut twice, none is missing"
    newest = published_versions(run.root / "weights")[-1]
    assert newest == PolicyVersion(1, saved[-1] + 4), "versions past the checkpoint were abandoned: a new lineage"


def test_what_one_run_sampled_others_train_though_its_engine_was_lost(tmp_path: Path, tiny_model: Path) -> None:
    faults = [Fault(process="inference-0", point="sampling.during", action="SIGKILL", count=40),
              Fault(process="orchestrator-0", point="batch.during", action="SIGKILL", count=3)]  # fmt: skip
    run = ForkedRun(tmp_path, tiny_model, "sampled", "mode=sample", "max_steps=12", "orchestrator.max_inflight=auto",
                    "inference.engine_args={skill0: 0.5, token_s: 0.02, kv_tokens: 512}", HELD_OUT, "env.eval.every=2",
                    faults=faults)  # fmt: skip
    code, text = run.wait()
    assert code == 0, text
    assert [(row["step"], row["eval/held_out/version"]) for row in run.metrics if "eval/held_out/reward" in row] == [
        (12, 0.0)
    ], "what nobody trains is evaluated once"
    said = run.log("orchestrator-0") + (run.root / "logs/attempt_1/orchestrator-0.restart_1.log").read_text()
    assert "inference-0 left the rotation" in said
    assert run.cut == list(range(1, 13)) and run.summary["steps"] == 12
    manifest, samples, _ = read_batch(run.root / "rollouts", 12)
    assert manifest.step == 12 and samples, "the base model is not too old for step 12"
    told = [row for row in run.metrics if "concurrency/limit" in row]
    assert "begins with 8 rollouts in flight; the KV caches hold [512] tokens" in run.log("orchestrator-0")
    assert told and all(row["concurrency/limit"] >= 8 and 0 <= row["engines/kv_usage"] <= 1 for row in told)
    assert not list((run.root / "logs" / "attempt_1").glob("trainer*"))

    trained = ForkedRun(tmp_path, tiny_model, "trained", "mode=replay", "max_steps=12",
                       f"trainer.replay.rollouts={run.root / 'rollouts'}")  # fmt: skip
    code, text = trained.wait()
    assert code == 0, text
    assert trained.reported == list(range(1, 13)) and trained.summary["steps"] == 12

    rows, best = tmp_path / "rows.jsonl", ["--min-reward", "0.5", "--best", "1", "--out", str(tmp_path / "rows.jsonl")]
    assert collect.main([str(run.root), *best]) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) > 4 and len({row["task_id"] for row in found}) == len(found)
    assert all(row["reward"] >= 0.5 and row["messages"][-1]["role"] == "assistant" for row in found)
    code, text = launch_forked(
        tmp_path / "tuned.out", "+experiment=reverse_text_sft_cpu", "launcher=local", f"model.path={tiny_model}",
        f"trainer.sft.data={rows}", "trainer.sft.batch_size=4", "trainer.sft.probe={every: 0, stop_at: null}",
        "trainer.sft.validation={every: 1, rows: 2}", "trainer.threads=1", "max_steps=2", f"run.output_dir={tmp_path}",
        "run.name=tuned")  # fmt: skip
    assert code == 0, text
    tuned = RunDirectory(tmp_path / "tuned")
    assert tuned.reported == [1, 2] and tuned.summary["validation_loss"] < 5
    assert complete_steps(trained.root / "checkpoints")[-1] == 12
    assert [path.name for path in (trained.root / "logs" / "attempt_1").glob("*.log")] == ["trainer-0.log"]


def test_the_process_that_failed_first_is_named_and_the_rest_is_stopped(tmp_path: Path, tiny_model: Path) -> None:
    faulty = "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.002, faults: {exit: 1}}"
    run = ForkedRun(tmp_path, tiny_model, "faulty", "max_steps=3", faulty, "recovery.inference.on_failure=stop")
    code, text = run.wait()
    assert code == 1
    assert "inference-0 failed first (exit code" in text
    assert not run.survivors()


def test_an_environment_that_does_not_load_ends_the_run_with_its_reason(tmp_path: Path, tiny_model: Path) -> None:
    run = ForkedRun(tmp_path, tiny_model, "broken", "max_steps=3", "env.train=[{id: prime_hpc.envs.reverse_text, "
                   "args: {min_len: 9, max_len: 3}, sampling: {max_tokens: 14}}]")  # fmt: skip
    code, text = run.wait()
    assert code == 1
    assert "env-reverse_text-0 failed first" in text
    assert "min_len is 9, more than max_len, which is 3" in text
    assert not run.survivors()


def test_processes_leave_by_themselves_when_their_supervisor_is_killed(tmp_path: Path, tiny_model: Path) -> None:
    run = ForkedRun(tmp_path, tiny_model, "fenced", "max_steps=500", SKILL, "cluster.lease_s=3")
    run.wait_for_step(1)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    deadline = time.monotonic() + 240
    while run.survivors() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not run.survivors()
    assert "the supervisor gave no sign for 3 s" in run.log("trainer-0")
