"""What commands print into a pipe keeps its lines whole."""

import pytest
from rich.console import Group
from rich.table import Table

from prime_hpc.observe.console import WIDTH, open_console


@pytest.mark.parametrize(("columns", "width"), [(None, WIDTH), ("60", 60)])
def test_a_pipe_is_wide_unless_its_reader_says_otherwise(columns: str | None, width: int,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert open_console().width == width


def test_brackets_and_colons_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Overrides of a sweep, and the last words of a model in an error."""
    table = Table(box=None, pad_edge=False)
    table.add_row("lora.targets=[q_proj]", "a reply '[/INST]'")
    open_console().print(Group("12:100:00 [/INST]", table))
    said = capsys.readouterr().out
    assert "12:100:00 [/INST]" in said and "lora.targets=[q_proj]" in said and "a reply '[/INST]'" in said
