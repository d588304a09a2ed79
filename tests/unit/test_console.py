"""What commands print into a pipe keeps its lines whole."""

import pytest

from prime_hpc.observe.console import WIDTH, open_console


@pytest.mark.parametrize(("columns", "width"), [(None, WIDTH), ("60", 60)])
def test_a_pipe_is_wide_unless_its_reader_says_otherwise(columns: str | None, width: int,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert open_console().width == width
