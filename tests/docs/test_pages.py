"""The pages hold together: links, names of the reference, the map of the paper, and the words of the field."""

import functools
import re
from pathlib import Path

import pytest

import neuromanifold as nm
from neuromanifold import bounds

ROOT = Path(__file__).parents[2]
WRITTEN = ("_build", "api", "commands.md")  # by the build of the site
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted(path for path in (ROOT / "docs").rglob("[!_]*.md") if not set(path.parts) & set(WRITTEN)),
]
PAGES = [path for path in PAGES if path.name not in WRITTEN]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Links.


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", "")))
    return kept.strip().lower().replace(" ", "-")


@functools.cache
def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def dead_links(page: Path, text: str) -> list[str]:
    """Links of a page to files and headings that are not there."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text)) + re.findall(r'src="([^"]+)"', text):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if link.startswith(("http://", "https://")) or path.name in WRITTEN or "api" in path.parts:
            continue
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page, page.read_text())


def test_a_dead_link_would_be_seen() -> None:
    page = ROOT / "docs" / "index.md"
    text = "[a](get-started/install.md) [b](gone.md) [c](how-to/gpu.md#gone) [d](https://x.y) `[e](code)` [f](#gone)"
    assert dead_links(page, text) == ["gone.md", "how-to/gpu.md#gone", "#gone"]


# Formulas.


def broken_formulas(text: str) -> list[str]:
    """Lines inside a formula that begin like an item of a list, a heading or a quote, where Markdown ends it."""
    found, inside = [], False
    for line in re.sub(r"^```.*?^```|`[^`\n]*`|\$\$.*?\$\$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        inside = inside and bool(line.strip())
        if inside and re.match(r"\s*([-+*>]|#+|\d+\.)\s", line):
            found.append(line.strip())
        inside ^= line.replace(r"\$", "").count("$") % 2 == 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_formulas_are_whole(page: Path) -> None:
    assert not broken_formulas(page.read_text())


def test_a_broken_formula_would_be_seen() -> None:
    assert broken_formulas("Where $a\n- b$ is.\n\n- $c\n  + d$ costs `$1`\n- e") == ["- b$ is.", "+ d$ costs"]


# The table of contents.


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = set(re.findall(r"^[^|\n]+ <([\w-]+/[\w-]+)>$", index, re.MULTILINE))
    linked = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES if "docs" in page.parts}
    parts = {"reference/implementations", "reference/variance"}  # of the reference, in its own table
    assert linked - parts == (listed | {"index"}) - {"reference/commands"}


# Reference.


def undocumented(page: str) -> set[str]:
    """Public names that the reference does not list."""
    listed = re.findall(r"^ {3}([\w.]+)$", page, re.MULTILINE)
    modules = {part for name in listed for part in name.split(".")[:-1]}
    return {name for name in nm.__all__ if name not in listed and name not in modules and not name.startswith("__")}


def test_every_public_name_is_in_the_reference_and_has_a_docstring() -> None:
    page = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert not undocumented(page)
    for name in nm.__all__:
        thing = getattr(nm, name)
        assert name == "__version__" or isinstance(thing, type(nm)) or (thing.__doc__ or "").strip(), name


def test_an_undocumented_name_would_be_seen() -> None:
    page = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert undocumented(page.replace("   fisher_diagonal\n", "")) == {"fisher_diagonal"}


# The map of the paper.

STATEMENTS = [
    *["Theorem 1", "Lemma 2", "Lemma 3", "Lemma 4", "Proposition 5", "Corollary 6", "Proposition 7", "Proposition 8"],
    *["Proposition 9", "Proposition 10", "Theorem 11", "Lemma 12", "Proposition 13", "Proposition 14"],
    *["remark: rank", "remark: $k = C-1$", "remark: relaxed", "remark: minibatches", "remark: trace"],
    *["section 4.1", "Table 1", "Table 2", "Figure 1", "Figure 2"],
    *[f"Eq. {number}" for number in (3, 4)],
]
MAP = (ROOT / "docs" / "paper" / "index.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in MAP.splitlines() if line.startswith("| ")]


def missing_functions(cell: str) -> list[str]:
    """Names in a cell that are not there: `core` is `nm.Categorical(logits)`, `bounds` the package or a result."""
    places = {"nm": [nm], "core": [nm.Categorical], "bounds": [bounds, bounds.NetworkBounds]}
    used = re.findall(r"`(nm|core|bounds)\.([\w.]+)", cell)
    return [
        f"{place}.{names}"
        for place, names in used
        if not any(
            functools.reduce(lambda thing, name: getattr(thing, name, None), names.split("."), found)
            for found in places[place]
        )
    ]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_statement_has_a_page_and_what_shows_it(statement: str) -> None:
    (row,) = (row for row in ROWS if row[0] == statement or row[0].startswith(f"{statement} "))
    assert re.search(r"\]\([\w./-]+\.md\)", " ".join(row)), "no page"  # test_links_lead_somewhere follows it
    if not statement.startswith(("Table", "Figure")):
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row[-1])
        assert tests
        assert all((ROOT / test).exists() for test in tests)
        assert "`" in row[2]
        assert not missing_functions(row[2])


def test_every_numbered_equation_has_a_row() -> None:
    numbers = {
        int(n) for row in ROWS for group in re.findall(r"Eq\. ([\d, ]+)", row[0]) for n in re.findall(r"\d+", group)
    }
    assert numbers == set(range(1, 11))


def test_a_missing_function_would_be_seen() -> None:
    assert missing_functions("`nm.gone`, `core.spectrum(k)`, `bounds.cantelli`, `core.gone()`") == [
        "nm.gone",
        "core.gone",
    ]


# The words of the field.

DIALECT = (
    *("by samples", "by batches", "sample-wise", "batch-wise", "squared on its own", "squared as a whole"),
    *("hears that", "done as always", "by the clock", "listener", "tried out", "meets the samples", "meeting"),
    *("settle", "even predictions", "carries an entry", "carry an entry", "often sold"),
    *("sounds", "pictures", "words of a language model", "so-and-so", "go on from there"),
)
SAID = re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?!\w)" for word in DIALECT), re.IGNORECASE)


def dialect(text: str) -> list[str]:
    """Words that are not those of the field."""
    return SAID.findall(re.sub(r"`[^`\n]*`", "", text))


def test_pages_and_code_use_the_words_of_the_field() -> None:
    latest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    texts = {name_of(page): page.read_text() for page in PAGES} | {"CHANGELOG.md": latest}
    texts |= {name_of(path): path.read_text() for path in (ROOT / "src").rglob("*.py")}
    found = {name: words for name, text in texts.items() if (words := dialect(text))}
    assert not found


def test_dialect_would_be_seen() -> None:
    assert dialect("Squares are by samples; the meeting of sounds. `by batches` is code.") == [
        "by samples",
        "meeting",
        "sounds",
    ]
