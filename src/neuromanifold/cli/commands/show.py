"""`neuromanifold show`: a result as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.cli.console import print_result
from neuromanifold.cli.options import Patterns
from neuromanifold.core.checks import message
from neuromanifold.results import DiagonalFisher, load


def show_command(
    file: Annotated[Path, typer.Argument(help="A result: fim.safetensors, bounds, or the JSON file of a trace.")],
    parameters: Patterns = None,
    sums: Annotated[bool, typer.Option("--sum", help="Show sums over the samples instead of means.")] = False,
    tokens: Annotated[bool, typer.Option("--per-token", help="Show means per token instead of per sequence.")] = False,
    each: Annotated[bool, typer.Option("--each", help="Show each parameter instead of each component.")] = False,
) -> None:
    """Show a result: a row for each component of the network, with its standard error, and where it comes from."""
    result = load(file)
    if not isinstance(result, DiagonalFisher):
        typer.echo(str(result))
        return
    result = result.filter(*parameters) if parameters else result
    if sums and tokens:
        raise ValueError(message("sum", "given without --per-token", "both"))
    print_result(result.sum if sums else result.per_token if tokens else result.mean, each)
