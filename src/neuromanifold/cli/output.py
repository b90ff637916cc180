"""What commands print with."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

_WIDE = 120  # where the output goes into a file, and nobody says how wide it is
_LEAST = 16  # characters of a name


def output_console() -> Console:
    """Standard output; as wide as the terminal."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)


def print_line(console: Console, name: str, value: object) -> None:
    """A fact, in a line of its own."""
    console.print(f"{name + ':':12}{value}", markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Names on the left, which lose their beginning where there is little room; numbers on the right.

    A last row with the name "all" stands apart.
    """
    numbers = [max(len(row[i]) for row in (header, *rows)) for i in range(1, len(header))]
    room = max(_LEAST, console.width - sum(width + 2 for width in numbers) - 2)
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for i, row in enumerate(rows):
        if row[0] == "all" and i == len(rows) - 1:
            table.add_section()
        table.add_row(row[0] if len(row[0]) <= room else f"…{row[0][1 - room :]}", *row[1:])
    console.print(table)
    console.print()
