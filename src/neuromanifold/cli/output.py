"""What commands print with."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console

from neuromanifold.results.table import text_table

_WIDE = 120  # where the output goes into a file, and nobody says how wide it is


def output_console() -> Console:
    """Standard output; as wide as the terminal."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)


def print_line(console: Console, name: str, value: object) -> None:
    """A fact, in a line of its own."""
    console.print(f"{name + ':':12}{value}", markup=False, highlight=False, soft_wrap=True)


def print_table(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> None:
    """Print a title, a table as wide as the console at the most, and a note below it."""
    text = "\n".join([title, text_table(header, rows, width=console.width), *([note] if note else [])])
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print()
