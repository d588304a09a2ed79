"""The console of commands and launchers."""

import os

from rich.console import Console

WIDTH = 200
"""Of output that goes into a pipe or a file, which rich would break at 80 columns."""


def open_console() -> Console:
    """As wide as the terminal, or `COLUMNS`; elsewhere wide enough to leave paths and tables whole.

    Text stays as it is: rich would read brackets as styles, and words between colons as pictures.
    """
    console = Console(markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console
