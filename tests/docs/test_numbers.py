"""Every measured number of the README and the pages is that of its source: docs/sources.toml, docs/sources.py."""

import pytest
from docs.sources import agrees, differing, filled_in, numbers, pages, without_source

ENTRIES, PAGES = numbers(), pages()


def test_every_entry_is_of_a_page() -> None:
    assert ENTRIES.keys() - {"given"} <= PAGES.keys()


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_their_sources(page: str) -> None:
    entry, text = ENTRIES.get(page, {}), PAGES[page]
    assert not differing(text, entry)
    assert not without_source(text, entry)


def test_a_wrong_number_and_one_without_a_source_would_be_seen() -> None:
    entry = {"claims": [{"text": "correlation {} of", "from": ["uses-similarity.md: | frechet | {} ±"]}]}
    right = "A correlation 0.98 of tasks; `0.3` and $0.4$ are code and formula, 95 classes a count."
    assert not differing(right, entry) + without_source(right, entry)
    wrong = right.replace("0.98", "0.97")
    (line,) = differing(wrong, entry)
    assert "0.97" in line
    assert "0.978" in line
    assert filled_in(wrong, entry) == right
    assert len(without_source(right + " It is 3 times faster, by 4 %.", entry)) == 2
    assert differing("Nothing.", entry) == ["the page does not say 'correlation {} of'"]
    moved = {"claims": [{"text": "correlation {} of", "from": ["uses-similarity.md: | gone | {}"]}]}
    assert "does not have" in differing(right, moved)[0]


def test_rows_that_a_results_file_has_are_no_claims() -> None:
    row = "| cosine | 0.969 ± 0.004 |"
    assert not without_source(f"Text.\n\n{row}\n", {"files": ["uses-similarity.md"]})
    assert len(without_source(f"Text.\n\n{row.replace('9', '8')}\n", {"files": ["uses-similarity.md"]})) == 2


def test_agreement_is_rounding() -> None:
    assert agrees("0.98", 0.978)
    assert not agrees("0.98", 0.974)
    assert agrees("1e-6", 1.17e-6)
    assert agrees("1,095", 1095.3)
    assert not agrees("2", 2.6)
