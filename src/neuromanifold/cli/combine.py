"""`neuromanifold combine`: parts of the data, added."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.cli.options import check_output
from neuromanifold.cli.output import output_console, print_line
from neuromanifold.cli.show import print_result
from neuromanifold.core.checks import message
from neuromanifold.results.diagonal import load_diagonal


def combine(
    files: Annotated[list[Path], typer.Argument(help="Results over disjoint data, such as shards of one run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, in safetensors format.")],
) -> None:
    """Add results over disjoint data: `estimate --shard 0/2` and `--shard 1/2` together are one run."""
    if len(files) < 2:
        raise ValueError(message("files", "two or more results", str(len(files))))
    doubled = next(
        (str(path) for i, path in enumerate(files) if path.resolve() in {p.resolve() for p in files[:i]}), ""
    )
    if doubled:
        raise ValueError(message("files", "different ones", f"{doubled} twice", "The same data count once."))
    check_output(output, *files)
    total, *others = [load_diagonal(path) for path in files]
    for path, other in zip(files[1:], others, strict=True):
        try:
            total = total + other
        except ValueError as error:
            raise ValueError(f"{path} cannot be added to what comes before it: {error}") from error
    total.save(output)
    console = output_console()
    print_result(console, total, only=("trace", "estimator", "samples"))
    print_line(console, "written", output)
