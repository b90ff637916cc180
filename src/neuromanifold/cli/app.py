"""The application object, with every command registered."""

from __future__ import annotations

from typing import Annotated

import typer

import neuromanifold
from neuromanifold.cli.core_space import core_space
from neuromanifold.cli.demo import demo

app = typer.Typer(name="neuromanifold", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(core_space)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neuromanifold {neuromanifold.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The Fisher information of neural networks, with known accuracy."""
