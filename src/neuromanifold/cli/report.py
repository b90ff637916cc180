"""`neuromanifold report`: a page about one result, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from neuromanifold.cli.options import check_output
from neuromanifold.report.page import write_page
from neuromanifold.results.diagonal import load_diagonal


def report(
    files: Annotated[list[Path], typer.Argument(help="Results; the others are compared with the first.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("fisher.html"),
) -> None:
    """Write one self-contained HTML page about a Fisher diagonal, or about several side by side."""
    check_output(output, *files)
    results = [load_diagonal(path) for path in files]
    written = write_page(output, results, [path.stem for path in files] if len(files) > 1 else None)
    megabytes = written.stat().st_size / 1e6
    Console().print(f"Page: {written} ({megabytes:.1f} MB, needs no network)", markup=False, soft_wrap=True)
