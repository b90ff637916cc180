"""The command line: `neuromanifold`, also `python -m neuromanifold`.  One file for each command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say how to install it."""
    try:
        from neuromanifold.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit("The command line needs typer and rich: pip install 'neuromanifold[cli,plots]'.")
    from neuromanifold.cli.launched import end, world_size

    try:
        app()
    except SystemExit as ended:
        if world_size() > 1:
            end(ended.code)
        raise
