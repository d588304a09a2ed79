"""A whole run that the guard holds back."""

from pathlib import Path

from prime_hpc.commands import tune
from tests.integration.runs import ForkedRun
from tests.integration.test_local_runs import SKILL


def test_a_run_that_nobody_lets_go_on_saves_and_leaves_and_goes_on_later(tmp_path: Path, tiny_model: Path) -> None:
    arguments = ("max_steps=40", SKILL, "pause.max_s=1")
    guard = "guard={batch/rollouts: {above: 1, steps: 2, action: pause}}"
    run = ForkedRun(tmp_path, tiny_model, "held", guard, *arguments)
    code, text = run.wait()
    assert code == 1, text
    past = "batch/rollouts = 16 at step 2, above 1 for 2 values in a row"
    on = f"python -m prime_hpc.commands.tune {run.root} paused=false"
    assert f"paused, since {past}; to go on: {on}" in text
    assert f"drained: saved and left, since the guard asked: {past}; nobody let it go on within 1 s" in text
    saved = run.reported[-1]
    assert 2 <= saved < 20 and (run.root / "checkpoints" / f"step_{saved}").is_dir()

    assert tune.main([str(run.root), "paused=false"]) == 0
    again = ForkedRun(tmp_path, tiny_model, "held", "resume=latest", f"max_steps={saved + 2}", *arguments[1:])
    code, text = again.wait()
    assert code == 0, text
    assert run.reported == list(range(1, saved + 3))
