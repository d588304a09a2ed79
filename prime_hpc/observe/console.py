"""The console of commands and launchers."""

import os

from rich.console import Console

WIDTH = 200
"""Of output that goes into a pipe or a file, which rich would break at 80 columns."""


def open_console() -> Console:
    """As wide as the terminal, or `COLUMNS`; elsewhere wide enough to leave paths and tables whole."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)
