"""Run the snippets of docs/get-started/coming-from.md with the tools that they name, and keep what they print.

    PYTHONPATH=src:benchmarks python benchmarks/coming_from.py

Needs benchmarks/others-requirements.txt, and laplace-torch with its requirements.  Each snippet has its own process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from common import RESULTS

import neuromanifold

PAGE = Path(__file__).parents[1] / "docs" / "get-started" / "coming-from.md"
PACKAGES = {  # heading of the page: distribution
    "BackPACK": "backpack-for-pytorch",
    "curvlinops": "curvlinops-for-pytorch",
    "nngeometry": "nngeometry",
    "ASDL": "asdfghjkl",
    "laplace-torch": "laplace-torch",
    "kronfluence": "kronfluence",
}


def snippets(page: str) -> dict[str, tuple[str, str]]:
    """Return the version and the code of each tool's section."""
    sections = re.findall(r"^## ([\w-]+) (\d\S*)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return {name: (tag, re.findall(r"```py\n(.*?)```", text, re.DOTALL)[0]) for name, tag, text in sections}


def main() -> None:
    page = PAGE.read_text()
    setting = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    lines = ["# Snippets of other tools", "", "`PYTHONPATH=src:benchmarks python benchmarks/coming_from.py` · "]
    lines[-1] += f"neuromanifold {neuromanifold.__version__}, torch {torch.__version__}"
    lines += ["", "| tool | version | printed | as the page says |", "| --- | --- | --- | --- |"]
    for name, (tag, code) in snippets(page).items():
        found = version(PACKAGES[name])
        output = subprocess.run([sys.executable, "-W", "ignore", "-c", setting + code], capture_output=True, text=True)
        printed = (output.stdout.strip().splitlines() or [output.stderr.strip().splitlines()[-1]])[-1]
        promised = re.findall(r"# (\S+)$", code.strip())[-1]
        lines.append(f"| {name} | {found} | {printed} | {'yes' if (printed, found) == (promised, tag) else 'no'} |")
        print(lines[-1])
    (RESULTS / "coming-from.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
