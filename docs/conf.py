import os
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
html_css_files = ["tables.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"

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


def setup(application: object) -> None:
    """Have the page of commands written before the pages are read."""
    application.connect("builder-inited", write_commands)
