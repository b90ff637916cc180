"""The application object, with every command registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import neuromanifold
from neuromanifold.cli.commands.bounds import bounds_command
from neuromanifold.cli.commands.check import check_command
from neuromanifold.cli.commands.combine import combine_command
from neuromanifold.cli.commands.compare import compare_command
from neuromanifold.cli.commands.core_space import core_space_command
from neuromanifold.cli.commands.demo import demo_command
from neuromanifold.cli.commands.env import env_command
from neuromanifold.cli.commands.estimate import estimate_command
from neuromanifold.cli.commands.forecast import forecast_command
from neuromanifold.cli.commands.merge import merge_command
from neuromanifold.cli.commands.report import report_command
from neuromanifold.cli.commands.reproduce import reproduce_command
from neuromanifold.cli.commands.show import show_command
from neuromanifold.cli.errors import FriendlyGroup
from neuromanifold.cli.launched import world_size
from neuromanifold.core.checks import message

app = typer.Typer(
    name="neuromanifold",
    cls=FriendlyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Model and data": (estimate_command, forecast_command, check_command, bounds_command),
    "Results": (show_command, compare_command, combine_command, report_command),
    "Uses": (merge_command,),
    "Experiments and environment": (demo_command, reproduce_command, core_space_command, env_command),
}
for panel, commands in _PANELS.items():
    for command in commands:
        name = command.__name__.removesuffix("_command").replace("_", "-")
        app.command(name, rich_help_panel=panel)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neuromanifold {neuromanifold.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 (typer's)
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The Fisher information of neural networks, with known accuracy."""
    if world_size() > 1 and context.invoked_subcommand != "estimate":
        advice = "Run it without torchrun."
        raise ValueError(message("command", "estimate with several processes", str(context.invoked_subcommand), advice))
