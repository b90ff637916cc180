"""The code of the README and of the docs runs, and prints what it says it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROMISE = re.compile(r"^(print\(.*\))\s+#\s(.*)$", re.MULTILINE)


def promised_and_printed(code: str) -> tuple[list[str], list[str]]:
    """What the comments behind the print calls say, and what the calls print."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "page", "exec"), {"__name__": "__page__"})
    return [promise.strip() for _, promise in PROMISE.findall(code)], output.getvalue().strip().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs_and_prints_what_it_says(page: Path) -> None:
    code = "\n".join(BLOCK.findall(page.read_text()))
    promised, printed = promised_and_printed(code)
    assert promised == printed


def test_a_wrong_promise_would_be_seen() -> None:
    promised, printed = promised_and_printed("print(1 + 1)  # 3\n")
    assert promised != printed


def test_the_readme_has_code() -> None:
    assert BLOCK.search((ROOT / "README.md").read_text())


def test_every_local_link_of_the_readme_leads_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text) + re.findall(r'src="(?!https?:)([^"]+)"', text)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_every_file_that_a_page_names_is_there() -> None:
    """Results of benchmarks, scripts and sources; `accuracy-*.md` stands for several."""
    named = re.compile(r"`((?:benchmarks|docs|src|tests)/[\w./*-]+\.\w+)`")
    found = {(page.name, name) for page in [*PAGES, ROOT / "CHANGELOG.md"] for name in named.findall(page.read_text())}
    assert len(found) >= 10
    assert not [(page, name) for page, name in sorted(found) if not list(ROOT.glob(name))]
