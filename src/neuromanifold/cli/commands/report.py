"""`neuromanifold report`: a page about one result, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.cli.console import print_facts
from neuromanifold.cli.parsing import check_output
from neuromanifold.report.page import write_page
from neuromanifold.results.diagonal import load_diagonal
from neuromanifold.results.files import byte_size


def report_command(
    files: Annotated[list[Path], typer.Argument(help="Results; the others are compared with the first.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("fisher.html"),
) -> None:
    """Write one self-contained HTML page about a Fisher diagonal, or about several side by side."""
    check_output(output, *files)
    results = [load_diagonal(path) for path in files]
    written = write_page(output, results, [path.stem for path in files] if len(files) > 1 else None)
    print_facts({"page": f"{written} ({byte_size(written.stat().st_size)}, needs no network)"})
