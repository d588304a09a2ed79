"""Evaluations during training, in whole runs on the fake engine: they hold nobody up; what is cut off is repeated."""

import subprocess
import sys
from pathlib import Path

from prime_hpc.cluster.faults import Fault
from prime_hpc.observe.records import evaluations, read_records, record_path
from tests.integration.runs import REPOSITORY, ForkedRun
from tools.endurance import broken_promises

ENGINE = "inference.engine_args={skill0: 0.5, skill_per_version: 0, token_s: 0.002}"
HELD_OUT = ("{id: prime_hpc.envs.reverse_text, name: held_out, args: {seed: 9}, num_tasks: 3, rollouts_per_task: 1, "
            "sampling: {max_tokens: 14}}")  # fmt: skip


def sources(*others: str, **env_args: object) -> str:
    """The override of `env.eval.sources`: `slow`, whose episodes have a pause, and others."""
    given = ", ".join(f"{name}: {value}" for name, value in env_args.items())
    slow = f"{{id: tests.integration.slow, env_args: {{{given}}}, sampling: {{max_tokens: 8}}}}"
    return f"env.eval.sources=[{', '.join((slow, *others))}]"


def figures(run: ForkedRun, source: str) -> dict[int, dict[str, float]]:
    """What was measured of a source, by step and name."""
    prefix = f"eval/{source}/"
    return {row["step"]: {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
            for row in run.metrics if f"{prefix}reward" in row}  # fmt: skip


def restarts(run: ForkedRun) -> list[str]:
    return [event["unit"] for event in run.events if event["kind"] == "restart"]


def test_training_goes_on_while_an_evaluation_lasts_and_one_that_is_cut_off_is_repeated(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Its episodes end when the last step is over. The orchestrator is killed once the other source has figures."""
    fault, go = Fault(process="orchestrator-0", point="evaluation.after", action="SIGKILL"), tmp_path / "go"
    run = ForkedRun(tmp_path, tiny_model, "beside", "max_steps=14", ENGINE, "env.eval.every=2",
                    "env.eval.rollouts_per_task=2", sources(HELD_OUT, until=go), "trainer.batch_timeout_s=30",
                    "pause.max_s=20", "update.keep_versions=100", faults=[fault])  # fmt: skip
    run.wait_for_step(14)
    go.touch()
    code, text = run.wait()
    assert code == 0, text
    assert restarts(run) == ["orchestrator"] and broken_promises(run.root, 14) == []

    held_out, slow = figures(run, "held_out"), figures(run, "slow")
    assert set(held_out) >= {2, 14} and len(slow) == 2 and max(slow) == 14
    first, last, begun = slow[min(slow)], slow[14], min(slow)
    assert (first["version"], first["mixed"]) == (begun, 4), "it began again under the version that served then"
    assert first["version/min"] >= begun and first["version/max"] >= 13 and first["version/share"] < 1
    assert (last["version"], last["mixed"], last["version/min"], last["version/share"]) == (14, 0, 14, 1)
    log = (run.root / "logs" / "attempt_1" / "orchestrator-0.restart_1.log").read_text()
    assert f"slow is not evaluated after step 12, as its evaluation at v0.{begun} still runs" in log
    assert "is not evaluated after step 14" not in log
    assert {f"eval/{source}/reward" for source in ("held_out", "slow")} <= run.summary.keys()
    for source, count in (("held_out", 3), ("slow", 4)):
        records = list(read_records(record_path(evaluations(run.root / "rollouts", source), 14)))
        assert [record["source"] for record in records] == [source] * count


def test_updates_wait_for_an_evaluation_where_that_is_wanted_and_no_deadline_passes(
    tmp_path: Path, tiny_model: Path
) -> None:
    """The pause of its episodes is longer than anybody may wait for a batch otherwise."""
    run = ForkedRun(tmp_path, tiny_model, "held", "max_steps=4", ENGINE, "env.eval.every=2", "env.eval.hold_s=60",
                    "env.eval.at_start=true", "trainer.batch_timeout_s=2", "pause.max_s=1",
                    sources(pause_s=2.5))  # fmt: skip
    code, text = run.wait()
    assert code == 0, text
    assert restarts(run) == []
    measured = {
        step: (row["version"], row["mixed"], row["version/share"]) for step, row in figures(run, "slow").items()
    }
    assert measured == {step: (step, 0, 1) for step in (0, 2, 4)}


def test_a_run_that_leaves_gives_up_an_evaluation_and_repeats_it_when_it_goes_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    go = tmp_path / "go"
    settings = (ENGINE, "env.eval.every=2", sources(until=go), "checkpoint.keep_last=500")
    run = ForkedRun(tmp_path, tiny_model, "left", "max_steps=500", *settings)
    run.wait_for_step(3)
    subprocess.run([sys.executable, "-m", "prime_hpc.stop", str(run.root), "--drain"], check=True, cwd=REPOSITORY)
    code, text = run.wait()
    assert code == 0, text
    assert figures(run, "slow") == {}
    assert "the evaluation of slow at v0.2 is given up: the run leaves" in run.log("orchestrator-0")
    steps = run.summary["steps"]

    go.touch()
    again = ForkedRun(tmp_path, tiny_model, "left", f"max_steps={steps + 1}", "resume=latest", *settings)
    code, text = again.wait()
    assert code == 0, text
    assert {step: row["version"] for step, row in figures(again, "slow").items()} == {
        step: step for step in (steps, steps + 1)
    }
