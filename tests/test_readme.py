"""The code of the README and of the docs runs, and prints what it says it prints."""

import contextlib
import inspect
import io
import re
from functools import cache
from pathlib import Path

import pytest

import neuromanifold as nm

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("[!_]*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROMISE = re.compile(r"^(print\(.*\))\s+#\s(.*)$", re.MULTILINE)


def path_in_repository(page: Path) -> str:
    return str(page.relative_to(ROOT))


def promised_and_printed(code: str) -> tuple[list[str], list[str]]:
    """What the comments behind the print calls say, and what the calls print."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "page", "exec"), {"__name__": "__page__"})
    return [promise.strip() for _, promise in PROMISE.findall(code)], output.getvalue().strip().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=path_in_repository)
def test_code_runs_and_prints_what_it_says(page: Path) -> None:
    code = "\n".join(BLOCK.findall(page.read_text()))
    promised, printed = promised_and_printed(code)
    assert promised == printed


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "uses" and page.stem != "index"], ids=lambda page: page.name
)
def test_examples_of_uses_are_short_and_have_a_model_of_transformers(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    assert max(block.count("\n") for block in blocks) < 40
    assert any("transformers." in block for block in blocks)


def test_a_wrong_promise_would_be_seen() -> None:
    promised, printed = promised_and_printed("print(1 + 1)  # 3\n")
    assert promised != printed


def test_the_readme_has_code() -> None:
    assert BLOCK.search((ROOT / "README.md").read_text())


def test_the_readme_has_the_table_of_tools_that_the_page_has() -> None:
    page = (DOCS / "get-started" / "coming-from.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) > 7
    assert "\n".join(table) in (ROOT / "README.md").read_text()
    tried = (ROOT / "benchmarks" / "results" / "coming-from.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[3:]]
    assert all(f"| {row[0]} | {row[1]} | True | yes |" in tried for row in rows)


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


@cache
def public_names_and_arguments() -> tuple[set[str], set[str]]:
    """The names of the package, and those of all arguments and fields of its functions, classes and methods."""
    names, arguments = {name for name in dir(nm) if not name.startswith("_")} | set(nm.__all__), set[str]()
    for thing in (getattr(nm, name) for name in sorted(names)):
        members = [getattr(thing, name) for name in dir(thing)] if isinstance(thing, type) else []
        for function in (thing, *members):
            with contextlib.suppress(TypeError, ValueError):
                arguments |= set(inspect.signature(function).parameters)
    return names, arguments


def unknown_names(text: str) -> set[str]:
    """`nm.something` that is not there, and arguments in code spans (`something=value`) that nothing takes."""
    names, arguments = public_names_and_arguments()
    others = {"use_reentrant", "shuffle", "drop_last", "device_map", "extra_dims", "applies", "turned", "link_approx"}
    others |= {"experts_implementation", "distributed_config", "tp_size"}  # of transformers
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if not span.startswith(("-", "neuromanifold "))]
    keywords = {word for span in spans for word in re.findall(r"(?<![\w-])([A-Za-z_]\w*)=(?!=)", span)}
    used = set(re.findall(r"\bnm\.([A-Za-z_]\w*)", text))
    return used - names | {word for word in keywords - arguments - others if not word.isupper()}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=path_in_repository)
def test_every_name_that_a_page_uses_exists(page: Path) -> None:
    assert not unknown_names(page.read_text())


def test_a_name_that_is_gone_would_be_seen() -> None:
    text = "`nm.Full()`, `nm.fisher_factors(per='sample')`, `replay=True`, `nm.Exact(envelope=nm.Lower(1))`, `rtol=0.1`"
    assert unknown_names(text) == {"Full", "per", "replay"}
