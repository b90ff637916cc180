import os
import re
import sys
from pathlib import Path

import typer.cli

import neuromanifold
from neuromanifold.cli.app import app

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # docs.figures

project = "neuromanifold"
author = "The neuromanifold authors"
copyright = "2026, The neuromanifold authors"
release = version = neuromanifold.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # a page for each public name, from its docstring
    "sphinx.ext.napoleon",  # the "Args:" of docstrings
    "sphinx-mathjax-offline",
    "matplotlib.sphinxext.plot_directive",
]
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_templates", "figures"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"neuromanifold {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_use_rtype = False  # "A `DiagonalFisher`: ..." is one sentence
autodoc_preserve_defaults = True  # `Categorical`, not its address
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88  # longer ones have a line for each argument
default_role = "literal"  # `name` in a docstring is code

# Figures are made by running the code that stands beside them.
plot_include_source = True
plot_html_show_source_link = False
plot_html_show_formats = False
plot_formats = [("svg", 100)]
plot_pre_code = ""
plot_working_directory = str(ROOT)
os.environ.setdefault("MPLBACKEND", "Agg")


def write_commands(_: object) -> None:
    """Write docs/reference/commands.md from the help texts of the command line."""
    command = typer.main.get_command(app)
    text = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name="neuromanifold")
    page = ROOT / "docs" / "reference" / "commands.md"
    page.write_text(text.replace("# `neuromanifold`", "# Every command and option", 1))


def link_names(_: object, what: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
    """Link the public names that stand in docstrings, as `nm.name` or `name`, to their pages."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment; else napoleon takes what stands before a colon for a type
    names = "|".join(neuromanifold.__all__)
    span = re.compile(rf"(?<!`)`((?:nm\.)?({names})(?:\(\))?)`(?!`)")
    lines[:] = [span.sub(r":py:obj:`\1 <neuromanifold.\2>`", line) for line in lines]


def write_factories(*event: object) -> tuple[object, object] | None:
    """Write a default that a factory makes as `...`, since Sphinx cannot read `<factory>`."""
    signature, returned = event[-2:]
    return (signature.replace("<factory>", "..."), returned) if isinstance(signature, str) else None


def setup(application: object) -> None:
    """Have the page of commands written before the pages are read, and docstrings linked."""
    application.connect("builder-inited", write_commands)
    application.connect("autodoc-process-docstring", link_names, priority=400)  # before napoleon
    application.connect("autodoc-process-signature", write_factories)
