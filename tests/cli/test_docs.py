"""Every command and option of the docs page exists."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from neuromanifold.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
LINES = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line.startswith("neuromanifold ")
]
GROUP = typer.main.get_command(app)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_docs_can_be_typed(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    command = GROUP.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, arguments, resilient_parsing=False)  # refuses what there is not
    assert context.params


def test_every_command_has_a_line() -> None:
    shown = {shlex.split(line)[1] for line in LINES}
    assert shown >= {"estimate", "forecast", "check", "bounds", "show", "compare", "combine", "report"}
