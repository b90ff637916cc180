"""Tables as text: the one printer of everything that prints as a table."""

from __future__ import annotations

from collections.abc import Sequence

from neuromanifold.results.naming import fitted

WIDTH = 80  # of a table whose reader's screen is not known
TOTAL = "all"  # the name of a last row that is set apart by a line


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, width: int | None = None) -> str:
    """Aligned columns below a ruled header: `left` columns of text, then numbers, which are aligned at the right.

    Given a `width`, parameter names in the first column that would make a line longer lose their beginning, but never
    what distinguishes them from each other.
    """
    names = [row[0] for row in rows]
    if width is not None:
        others = sum(2 + max(len(row[i]) for row in (header, *rows)) for i in range(1, len(header)))
        names = fitted(names, max(len(header[0]), width - others))
    lines = aligned([header, *([name, *row[1:]] for name, row in zip(names, rows, strict=True))], left)
    rule = "-" * max(map(len, lines))
    lines.insert(1, rule)
    if len(rows) > 1 and rows[-1][0] == TOTAL:
        lines.insert(-1, rule)
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row, two spaces between columns: the first `left` columns begin at the left, others end right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    justified = (
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in justified]
