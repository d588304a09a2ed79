"""The failures that `tools.chaos` asks for are those of its table."""

import msgspec
import pytest

from prime_hpc.cluster.faults import VARIABLE, Faults
from prime_hpc.errors import InfrastructureFailure
from tools import chaos


def test_each_failure_happens_though_the_one_before_was_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed or suspended is started again; one whose failure was contained goes on."""
    cells = [cell for cell in chaos.all_cells() if cell.process == "inference-0"]
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(chaos.make_faults(cells)).decode())
    ended: list[int] = []
    monkeypatch.setattr("os.kill", lambda _, number: ended.append(number))
    happened, restart = [], 0
    faults = Faults("inference-0", restart)
    for cell in cells:
        try:
            faults.reach(cell.point)
        except InfrastructureFailure:
            happened.append("raise")
        while ended:
            happened.append(ended.pop().name)
            faults = Faults("inference-0", restart := restart + 1)
    assert happened == [cell.action for cell in cells]
