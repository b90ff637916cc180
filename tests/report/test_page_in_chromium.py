"""The page as a reader meets it, in Chromium: it draws, sorts, searches, takes keys, and prints; nothing is fetched."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neuromanifold.report.page import write_page
from tests.report.results import result, transformer

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'neuromanifold[test]'")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM = CHROMIUM or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium, or set CHROMIUM")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
FIM = result(transformer())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pages")
    return write_page(folder / "page.html", [FIM, result(transformer(1))], ["first", "second"]).as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1200, "height": 900}, accept_downloads=True)
    tab = context.new_page()
    complaints: list[str] = []
    fetched: list[str] = []
    tab.on("console", lambda said: complaints.append(said.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: fetched.append(request.url))
    tab.goto(address)
    yield tab
    context.close()
    assert complaints == []
    assert [url for url in fetched if not url.startswith(("file:", "data:", "blob:"))] == []


def names(page: Any) -> list[str]:
    return page.eval_on_selector_all("#parameters tbody tr:not([hidden]) th", "cells => cells.map(c => c.textContent)")


def test_everything_is_drawn(page: Any) -> None:
    sizes = """selector => [...document.querySelectorAll(selector)].map(e => {
        const r = e.getBoundingClientRect(); return [r.width, r.height]; })"""
    for selector in (".histogram .area", ".depth .whisker", ".tile", ".depth .strip svg", "#parameters tbody tr"):
        found = page.evaluate(sizes, selector)
        assert found, selector
        assert all(max(size) > 1 for size in found), selector
    assert len(page.query_selector_all(".panel")) == 4
    hits = page.evaluate(sizes, ".hits")[0]
    strips = page.evaluate("[...document.querySelectorAll('.strip')].map(e => e.getBoundingClientRect().bottom)")
    top, bottom = page.evaluate("(r => [r.top, r.bottom])(document.querySelector('.hits').getBoundingClientRect())")
    assert hits[1] > 300
    assert bottom == pytest.approx(max(strips), abs=1)
    assert top == pytest.approx(page.evaluate("document.querySelector('.strip').getBoundingClientRect().top"), abs=1)


def test_search_keeps_what_has_every_word(page: Any) -> None:
    assert names(page) == list(FIM)
    page.fill("#search", "LAYER.1 weight")
    assert names(page) == [name for name in FIM if "layer.1" in name and "weight" in name]
    assert page.text_content("#shown") == f"{len(names(page))} of {len(FIM)} parameters"
    page.fill("#search", "nothing like it")
    assert names(page) == []
    page.fill("#search", "")
    assert names(page) == list(FIM)


def test_columns_sort_by_value_both_ways(page: Any) -> None:
    means = {name: float(FIM[name].double().mean()) for name in FIM}
    page.click("#parameters th button >> text=/^mean$/")
    assert names(page) == sorted(FIM, key=lambda name: -means[name])
    head = page.locator("#parameters th[aria-sort]")
    assert head.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")  # the heading has the focus
    assert names(page) == sorted(FIM, key=lambda name: means[name])
    page.click("#parameters th button >> text=median > 0")
    assert names(page)[-1] == "net.layer.1.key.bias"  # what has no median comes last
    page.click("#parameters th button >> text=parameter")
    assert names(page) == sorted(FIM)


def test_charts_take_mouse_and_keys(page: Any) -> None:
    tip = page.locator("#tip")
    assert tip.is_hidden()
    page.locator(".hits .hit").nth(1).hover()
    assert tip.text_content().startswith("net.layer.0.query\n")
    page.locator(".histogram").first.focus()
    page.keyboard.press("ArrowRight")
    assert tip.text_content().startswith("exactly zero\n80")
    page.keyboard.press("End")
    assert " to " in tip.text_content()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.locator(".treemap").first.focus()
    page.keyboard.press("ArrowRight")
    found = tip.text_content().split("\n")[0]
    page.keyboard.press("Enter")
    assert page.input_value("#search") == found
    assert names(page) == [found]


def test_the_table_is_saved_as_csv(page: Any) -> None:
    page.fill("#search", "classifier")
    with page.expect_download() as download:
        page.click("#csv")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith('"parameter","shape","entries"')
    assert [line.split(",")[0] for line in lines[1:]] == ['"classifier.weight"', '"classifier.bias"']


def test_light_dark_and_paper(browser: Any, address: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    for scheme, first, second in (("light", "252, 251, 249", "20, 24, 28"), ("dark", "20, 24, 28", "252, 251, 249")):
        context = browser.new_context(color_scheme=scheme)
        tab = context.new_page()
        tab.goto(address)
        assert tab.evaluate(ground) == f"rgb({first})"
        tab.click("#theme")
        assert tab.evaluate(ground) == f"rgb({second})"
        assert len(tab.pdf(format="A4")) > 20_000  # printed straight from the screen, as readers do
        tab.emulate_media(media="print")
        assert tab.evaluate(ground) == "rgb(255, 255, 255)"
        assert tab.locator("nav").is_hidden()
        context.close()


def test_a_table_too_wide_for_paper_does_not_empty_the_sheets(browser: Any, tmp_path: Path) -> None:
    """Chromium printed blank sheets where a table was wider than them."""
    long = {f"{'a_long_module_name.' * 8}{name}": value for name, value in transformer().items()}
    address = write_page(tmp_path / "six.html", [result(long)] * 6, [f"a rather long title {i}" for i in range(6)])
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(address.as_uri())
    assert len(tab.pdf(format="A4")) > 50_000  # blank ones have less than ten thousand
    context.close()


def test_a_phone_scrolls_tables_and_not_the_page(browser: Any, address: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    tab = context.new_page()
    tab.goto(address)
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.evaluate("document.querySelector('#table .scroll').scrollWidth") > 390
    context.close()


def test_every_control_is_reached_by_the_keyboard_and_has_a_name(page: Any) -> None:
    bad = page.evaluate("""[...document.querySelectorAll("button, input, a, .chart, .scroll")].filter(e =>
        e.tabIndex < 0 || !(e.getAttribute("aria-label") || e.textContent.trim())).map(e => e.outerHTML)""")
    assert bad == []
    assert page.evaluate("[...document.querySelectorAll('h1, h2')].map(h => h.tagName).join(' ')").startswith("H1 H2")
    assert page.get_attribute("html", "lang") == "en"
