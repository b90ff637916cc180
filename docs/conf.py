import os
import sys
from pathlib import Path

import neuromanifold

sys.path.insert(0, str(Path(__file__).parents[1]))  # docs.figures

project = "neuromanifold"
author = "The neuromanifold authors"
copyright = "2026, The neuromanifold authors"
release = version = neuromanifold.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # the "Args:" of docstrings
    "sphinx-mathjax-offline",
    "matplotlib.sphinxext.plot_directive",
]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 2
exclude_patterns = ["_build", "figures"]

html_theme = "furo"
html_title = f"neuromanifold {version}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"

# Figures are made by running the code that stands beside them.
plot_include_source = True
plot_html_show_source_link = False
plot_html_show_formats = False
plot_formats = [("svg", 100)]
plot_pre_code = ""
os.environ.setdefault("MPLBACKEND", "Agg")
