"""Measured numbers on the pages, and the results files that they come from.

`docs/sources.toml` lists for each page where its figures come from:

    ["docs/uses/merging.md"]
    files = ["uses-merging.md"]     # rows of the page's tables that stand there word for word need nothing else
    given = ["95 %"]                # not measured: settings, definitions, examples
    claims = [
      { text = "took {} MiB with shards", from = ["uses-merging-memory.md: peak {} MiB"] },
      { text = "{} times faster", from = ["a.md: | ours | {}", "a.md: | theirs | {}"], is = "b / a" },
    ]

`{}` stands for a number, `...` for any text. `from` names a file of benchmarks/results (or of the repository) and
the text around each number; `is` computes the page's numbers from those found, which are a, b, c, ... in their order.
A number agrees with its source if it is the source rounded to the digits shown. tests/docs/test_numbers.py compares.
`python docs/sources.py` prints what differs and what has no source; with `--write` it fills in the numbers that differ.
"""

import math
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"[-−]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[-+]?\d+)?"
MEASURED = re.compile(
    r"(?<![\w.])(?:\d[\d,]*\.\d+(?:e-?\d+)?(?!\w|\.\d)|\d+e-?\d+|\d[\d,]*(?=\s*(?:%|points?\b|times\b|[KMG]i?B\b|ms\b|s\b|µs\b)))"
)
NOT_PROSE = re.compile(
    r"^```.*?^```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)|<[^>]*>|^#.*?$|\d{4}-\d\d-\d\d", re.DOTALL | re.MULTILINE
)


def numbers() -> dict[str, dict]:
    """The content of docs/sources.toml: `given` of all pages, and what is said of each page."""
    return tomllib.loads((ROOT / "docs" / "sources.toml").read_text())


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression for a text with `{}` for numbers and `...` for anything."""
    special = {"{}": f"({NUMBER})", "...": r"\S.*?"}
    parts = re.split(r"(\{\}|\.\.\.|\s+)", text.strip())
    return re.compile(
        "".join(special.get(part, r"\s+" if part.isspace() else re.escape(part)) for part in parts), re.DOTALL
    )


def value(text: str) -> float:
    """The number that a text writes."""
    return float(text.replace(",", "").replace("−", "-"))


def unit(text: str) -> float:
    """One in the last place that is shown."""
    mantissa, _, exponent = text.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def agrees(shown: str, source: float) -> bool:
    """Whether a number is its source rounded to the digits that are shown."""
    return abs(value(shown) - source) <= 0.5 * unit(shown) * (1 + 1e-6)


def sources(claim: dict) -> list[float]:
    """The numbers that a claim's text should show."""
    found: list[float] = []
    for place in claim.get("from", []):
        name, _, text = place.partition(": ")
        path = RESULTS / name if (RESULTS / name).exists() else ROOT / name
        matches = pattern(text).search(path.read_text())
        if matches is None:
            raise LookupError(f"{name} does not have {text!r}")
        found += map(value, matches.groups())
    if "is" not in claim:
        return found
    computed = eval(
        claim["is"], {**vars(math), "min": min, "max": max, **dict(zip(ascii_lowercase, found, strict=False))}
    )
    return list(computed) if isinstance(computed, tuple) else [computed]


def shown_and_expected(text: str, claim: dict) -> Iterator[tuple[re.Match[str], int, float]]:
    """For each number of a page that a claim names: its match, its group, and what the source says."""
    matches = list(pattern(claim["text"]).finditer(text))
    if not matches:
        raise LookupError(f"the page does not say {claim['text']!r}")
    for match in matches:
        for group, expected in zip(range(1, len(match.groups()) + 1), sources(claim), strict=True):
            yield match, group, expected


def differing(text: str, entry: dict) -> list[str]:
    """Numbers of a page that differ from their source, and claims that cannot be found, each as a line."""
    lines = []
    for claim in entry.get("claims", []):
        try:
            for match, group, expected in shown_and_expected(text, claim):
                if not agrees(match[group], expected):
                    lines.append(f"{' '.join(match[0].split())!r} has {match[group]}, its source {expected:.6g}")
        except (LookupError, ValueError) as error:
            lines.append(str(error))
    return lines


def without_source(text: str, entry: dict) -> list[str]:
    """Measured numbers of a page (decimals, percentages, times, sizes) that no claim names, with their surroundings."""
    files = entry.get("files", [])
    rows = {
        line.strip() for name in files for line in (RESULTS / name).read_text().splitlines() if line.startswith("|")
    }
    hidden = [match.span() for match in NOT_PROSE.finditer(text)]
    hidden += [match.span() for match in re.finditer(r"^\|.*$", text, re.MULTILINE) if match[0].strip() in rows]
    for claim in entry.get("claims", []):
        hidden += [
            match.span(i + 1) for match in pattern(claim["text"]).finditer(text) for i in range(len(match.groups()))
        ]
    for given in [*numbers()["given"], *entry.get("given", [])]:
        hidden += [match.span() for match in pattern(given).finditer(text)]
    return [
        " ".join(text[max(0, match.start() - 60) : match.end() + 30].split())
        for match in MEASURED.finditer(text)
        if not any(start <= match.start() and match.end() <= end for start, end in hidden)
    ]


def pages() -> dict[str, str]:
    """README and all pages, by their path in the repository."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("[!_]*.md"))]
    written = ("_build/", "reference/api/", "reference/commands.md")
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for path in paths
        if not any(part in str(path) for part in written)
    }


def filled_in(text: str, entry: dict) -> str:
    """The page with each number that differs from its source replaced."""
    found = [one for claim in entry.get("claims", []) for one in shown_and_expected(text, claim)]
    for match, group, expected in sorted(found, key=lambda one: -one[0].start(one[1])):
        shown = match[group]
        if not agrees(shown, expected):
            digits = len(shown.partition("e")[0].partition(".")[2])
            style = f".{digits}e" if "e" in shown else f",.{digits}f" if "," in shown else f".{digits}f"
            new = re.sub(r"e([+-])0", r"e\1", format(expected, style))
            text = text[: match.start(group)] + new + text[match.end(group) :]
    return text


def main() -> int:
    """Print what differs and what has no source."""
    entries, wrong = numbers(), 0
    for page, text in pages().items():
        entry = entries.get(page, {})
        if "--write" in sys.argv:
            (ROOT / page).write_text(text := filled_in(text, entry))
        lines = differing(text, entry) + [f"no source for {line!r}" for line in without_source(text, entry)]
        print("".join(f"{page}: {line}\n" for line in lines), end="")
        wrong += len(lines)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
