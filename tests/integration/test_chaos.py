"""Failures at named points of the work, and kills at random, by `tools.chaos` and `tools.soak`: promises are kept."""

import importlib.util
import random
from pathlib import Path

import pytest

from tests.integration.runs import ForkedRun
from tools import chaos, soak
from tools.chaos import CONTAINED, ENDED, FAKE_ENGINE, NOT_REACHED, Cell, Outcome, all_cells
from tools.endurance import account, broken_promises

FEW = [
    Cell("trainer-1", "update.during", "SIGKILL"),
    Cell("trainer-1", "save.after", "raise"),
    Cell("trainer-1", "shutdown.during", "SIGKILL"),
    Cell("orchestrator-0", "batch.during", "raise"),
    Cell("orchestrator-0", "update.during", "SIGKILL"),
    Cell("inference-0", "sampling.during", "SIGSTOP"),
    Cell("inference-0", "update.during", "raise"),
    Cell("env-reverse_text-0", "sampling.before", "raise"),
    Cell("env-reverse_text-0", "sampling.after", "SIGKILL"),
]
REAL = [
    Cell("trainer-1", "step.during", "SIGKILL"),
    Cell("trainer-1", "save.before", "raise"),
    Cell("orchestrator-0", "sampling.after", "SIGKILL"),
    Cell("orchestrator-0", "update.during", "raise"),
    Cell("inference-0", "sampling.before", "SIGKILL"),
    Cell("inference-0", "sampling.during", "SIGSTOP"),
    Cell("inference-0", "update.before", "raise"),
    Cell("inference-0", "update.during", "SIGKILL"),
    Cell("env-reverse_text-0", "sampling.during", "raise"),
    Cell("env-reverse_text-0", "sampling.after", "SIGSTOP"),
]


def assert_survived(code: int, rows: list[Outcome], root: Path, steps: int) -> None:
    """Every cell was reached and followed by what it has to be followed by, and the run kept its promises."""
    print(chaos.render(rows), account(root, steps), sep="\n\n")
    assert code == 0
    assert [row.cell for row in rows if row.result == NOT_REACHED] == []
    assert [row.cell for row in rows if (row.result == CONTAINED) != row.cell.contained] == []
    unfinished = {row.cell.point.partition(".")[0] for row in rows if row.result == ENDED}
    assert unfinished <= {"shutdown"}, "what fails before the end recovers"
    assert broken_promises(root, steps) == []


def test_a_few_failures_of_every_role(tmp_path: Path, tiny_model: Path) -> None:
    faults = chaos.make_faults(FEW)
    run = ForkedRun(tmp_path, tiny_model, "chaos", *chaos.OVERRIDES, *FAKE_ENGINE, "env.workers=1", "max_steps=6",
                    faults=faults)  # fmt: skip
    code, _ = run.wait()
    assert_survived(code, list(chaos.outcomes(run.root, faults)), run.root, 6)


def test_a_storm_of_kills_breaks_no_promise(tmp_path: Path, tiny_model: Path) -> None:
    steps = 30  # which last longer than ten kills, whoever they hit
    run = ForkedRun(tmp_path, tiny_model, "stormy", *soak.settings(steps))
    killed = soak.kill_at_random(run.process, run.root, 12, kills=10, rng=random.Random(3), pause_s=1.0)
    code, text = run.wait()
    assert code == 0, text
    assert killed.total() == 10 and len(killed) >= 3
    assert broken_promises(run.root, steps) == []


@pytest.mark.slow
def test_every_role_fails_at_every_point_in_every_way(tmp_path: Path, tiny_model: Path) -> None:
    made = chaos.run("tools.forked", tmp_path, chaos.STEPS, all_cells(), tiny_model, *FAKE_ENGINE)
    assert_survived(*made, chaos.STEPS)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_ten_failures_with_real_engines(tmp_path: Path, tiny_model: Path) -> None:
    made = chaos.run("prime_hpc.launch", tmp_path, 12, REAL, tiny_model, "env.workers=1", "inference.replicas=1",
                     "inference.vllm.max_num_seqs=32", "orchestrator.drop_zero_advantage=false",
                     "env.train.0.args.reward=similarity", "recovery.hang_s=60")  # fmt: skip
    assert_survived(*made, 12)


@pytest.mark.slow
def test_two_hundred_kills_leave_the_rewards_as_they_were(tmp_path: Path, tiny_model: Path) -> None:
    killed, rewards = soak.soak(tmp_path, tiny_model, steps=300, kills=200, seed=0)
    assert killed.total() == 200 and len(killed) == 6, killed
    assert broken_promises(tmp_path / "stormy", 300) == []
    assert all(abs(errors) < soak.TOLERANCE for *_, errors in rewards), rewards
