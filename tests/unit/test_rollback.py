"""Where the trainer goes back to, and on which lineage."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.cluster.paths import RunPaths
from prime_hpc.launchers.rollback import roll_back
from prime_hpc.plan.run_plan import Fork, RunPlan, load, read_forks
from prime_hpc.transport import checkpoints
from prime_hpc.transport.checkpoints import CheckpointManifest


def save(paths: RunPaths, step: int, lineage: int = 0) -> Path:
    partial = checkpoints.partial_path(paths.checkpoints, step)
    partial.mkdir(parents=True)
    (partial / "shard").write_bytes(b"weights of %d" % step)
    return checkpoints.publish(partial, CheckpointManifest(
        step=step, lineage=lineage, world=1, journal_offset=10 * step, config={},
        files={"shard": checkpoints.describe(partial / "shard")}))  # fmt: skip


def plan_of(root: Path) -> RunPlan:
    return RunPlan(name=root.name, run_dir=str(root), attempt=1, nodes=1, forks=[], checkpoint=None, processes=[],
                   config={})  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> SimpleNamespace:
    """A run with checkpoints 2, 4 and 6."""
    paths = RunPaths(tmp_path)
    saved = {step: save(paths, step) for step in (2, 4, 6)}
    return SimpleNamespace(paths=paths, saved=saved, plan=plan_of(tmp_path))


def went_back(run: SimpleNamespace) -> tuple[str | None, list[Fork]]:
    """The checkpoint of the plan as ranks read it, and the history."""
    roll_back(run.plan, run.paths)
    plan = load(run.paths.plan)
    assert plan.forks == read_forks(run.paths.forks)
    return plan.checkpoint and Path(plan.checkpoint).name, plan.forks


def test_the_newest_checkpoint_begins_a_new_lineage(run: SimpleNamespace) -> None:
    assert went_back(run) == ("step_6", [Fork(lineage=1, step=6)])
    save(run.paths, 8, lineage=1)
    assert went_back(run) == ("step_8", [Fork(lineage=1, step=6), Fork(lineage=2, step=8)])


def test_without_a_checkpoint_the_base_model_trains_again(tmp_path: Path) -> None:
    plan = RunPlan(
        name="r", run_dir=str(tmp_path), attempt=1, nodes=1, forks=[], checkpoint=None, processes=[], config={}
    )
    assert went_back(SimpleNamespace(paths=RunPaths(tmp_path), plan=plan)) == (None, [Fork(lineage=1, step=0)])


@pytest.mark.parametrize("damaged", ["shard", "manifest.json"])
@pytest.mark.parametrize("data", [b"weights of 7", b"{"])
def test_a_damaged_checkpoint_is_passed_over(run: SimpleNamespace, damaged: str, data: bytes) -> None:
    (run.saved[6] / damaged).write_bytes(data)
    assert went_back(run) == ("step_4", [Fork(lineage=1, step=4)])
    assert checkpoints.find_latest(run.paths.checkpoints, run.plan.forks) == run.saved[4], "step 6 was abandoned"


def test_the_journal_is_needed_as_far_back_as_the_oldest_checkpoint(run: SimpleNamespace, tmp_path: Path) -> None:
    assert checkpoints.oldest_offset(run.paths.checkpoints) == 20
    checkpoints.prune(run.paths.checkpoints, keep_last=1, keep_every=0)
    assert checkpoints.oldest_offset(run.paths.checkpoints) == 60
    assert checkpoints.oldest_offset(tmp_path / "none") == 0
