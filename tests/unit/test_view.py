"""What a person reads of a run's progress."""

from prime_hpc.launchers.view import progress_line
from prime_hpc.observe.snapshot import Snapshot


def test_the_step_comes_first_and_in_one_piece() -> None:
    progress = {"served": 2, "step": 3, "of": 60, "reward": 0.53125, "s_per_step": 1.0}
    assert progress_line(Snapshot({}, progress)) == "step 3/60 | served 2 | reward 0.5312 | s per step 1"
    assert progress_line(Snapshot({}, {"served": 0})) == "served 0"
