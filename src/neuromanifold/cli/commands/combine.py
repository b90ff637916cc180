"""`neuromanifold combine`: the sum of results over disjoint data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.cli.console import print_result
from neuromanifold.cli.parsing import check_output
from neuromanifold.core.checks import message
from neuromanifold.results.diagonal import load_diagonal


def combine_command(
    files: Annotated[list[Path], typer.Argument(help="Results over disjoint data, such as the shards of one run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (safetensors).")],
) -> None:
    """Add results over disjoint data: `estimate --shard 0/2` and `--shard 1/2` together are one run."""
    if len(files) < 2:
        raise ValueError(message("files", "two or more results", str(len(files))))
    check_output(output, *files)
    total, *others = [load_diagonal(path) for path in files]
    for path, other in zip(files[1:], others, strict=True):
        try:
            total = total + other
        except ValueError as error:
            raise ValueError(f"{path} cannot be added to the files before it: {error}") from error
    total.save(output)
    print_result(
        total, only=("trace", "estimator", "right for F", "samples", "left out", "batches"), also={"written": output}
    )
