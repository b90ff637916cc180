"""The page: whole, safe, self-contained, and its numbers those of the tensors."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import neuromanifold as nm
from neuromanifold.report.depth import depth
from neuromanifold.report.formats import number
from neuromanifold.report.page import page, shared_comparison, write_page
from neuromanifold.results.summary import summarize
from tests.report.results import odd, result, transformer
from tests.run.test_contract import MODEL, batches

VOID = {"meta", "link", "input", "wbr"}
FIM = result(transformer())
PAGE = page([FIM])


class Page(HTMLParser):
    """Tags that open and close in order, cells of tables, and everything that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[tuple[str, str | None]]] = []
        self._cell: tuple[str, str | None] | None = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.loads += [str(given[key]) for key in ("src", "href", "action", "data", "poster") if key in given]
        self.ids += [str(given["id"])] if "id" in given else []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = ("", given.get("data-v"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        del tag, attributes  # <path/>

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            assert self._cell is not None
            self.rows[-1].append(self._cell)
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell = (self._cell[0] + data, self._cell[1])


def data(text: str) -> list[dict]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_it_is_whole_and_loads_nothing() -> None:
    made = Page(PAGE)
    assert all(link.startswith(("#", "data:")) for link in made.loads)
    assert {link[1:] for link in made.loads if link.startswith("#")} <= set(made.ids)
    assert len(set(made.ids)) == len(made.ids)
    assert not re.search(r"https?://|@import|url\(", PAGE)
    assert "default-src 'none'" in PAGE


def test_every_parameter_stands_in_the_table_with_its_numbers() -> None:
    rows = {row[0][0]: row for row in Page(PAGE).rows if row[0][0] in FIM}
    assert list(rows) == list(FIM)
    heads = [re.sub(r"\s", " ", text) for text, _ in next(row for row in Page(PAGE).rows if row[0][0] == "parameter")]
    trace = float(FIM.trace)
    for name, row in rows.items():
        x = FIM[name].double()
        cells = {head: value for head, (_, value) in zip(heads, row, strict=True)}
        texts = {head: text for head, (text, _) in zip(heads, row, strict=True)}
        positive = x[x > 0]
        assert texts["shape"] == "×".join(map(str, x.shape))
        assert int(cells["entries"] or 0) == x.numel()
        assert float(cells["zero"] or 0) == pytest.approx((x == 0).double().mean().item())
        assert float(cells["mean"] or 0) == pytest.approx(x.mean().item())
        assert texts["mean"] == number(x.mean().item())
        assert float(cells["largest"] or 0) == pytest.approx(x.max().item())
        assert float(cells["of trace"] or 0) == pytest.approx(x.sum().item() / trace)
        if len(positive):
            assert float(cells["median > 0"] or 0) == pytest.approx(positive.quantile(0.5).item())
            assert float(cells["p95 > 0"] or 0) == pytest.approx(positive.quantile(0.95).item())
            assert float(cells["rel. s.e."] or 0) == pytest.approx(0.1)
        else:
            assert cells["median > 0"] == ""
        assert texts["squared per"] == "sample"


def test_its_numbers_are_there_for_programs() -> None:
    (made,) = data(PAGE)
    assert made["samples"] == 10
    assert made["all"]["total"] == pytest.approx(float(FIM.trace))
    assert [one["name"] for one in made["parameters"]] == list(FIM)
    assert made["against_first"] is None


def test_provenance_and_error_bars_are_shown() -> None:
    text = PAGE.replace("\u00a0", " ")
    assert "± " in text
    assert FIM.provenance.model in text
    assert "upper bound of its standard error" in text
    for part in ("Hutchinson()", "neuromanifold", "2, 2 backward passes", "As stored"):
        assert part in text


def test_several_results_are_compared_with_the_first() -> None:
    other = result(transformer(5), estimator="Empirical()", target="biased (given labels)", count=20, noise=0)
    made = Page(text := page([FIM, other.sum, FIM]))
    titles = ["Hutchinson() (1)", "Empirical()", "Hutchinson() (2)"]
    first, second, third = data(text)
    assert [one["title"] for one in (first, second, third)] == titles
    assert second["all"]["total"] == pytest.approx(float(other.mean.trace))  # in the first one's view
    assert second["against_first"]["relmae_positive"] == pytest.approx(other.compare(FIM, epsilon=0).relmae_positive)
    assert third["against_first"]["relmae_positive"] == 0
    heads = next(row for row in made.rows if row[0][0] == "parameter")
    column = [text for text, _ in heads].index("ratio, Empirical()")
    for row in made.rows:
        if row[0][0] in FIM and FIM[row[0][0]].any():
            expected = float(other.mean[row[0][0]].double().sum() / FIM[row[0][0]].double().sum())
            assert float(row[column][1] or 0) == pytest.approx(expected, rel=1e-5)
    assert text.count('class="chart treemap"') == 3
    assert 'class="line s2"' in text


@pytest.mark.parametrize(
    "sums", [odd(), {}, {"a.weight": torch.zeros(2)}, {"w": torch.ones(())}], ids=["odd", "none", "zero", "one"]
)
def test_odd_results_have_a_page_too(sums: dict[str, torch.Tensor]) -> None:
    for text, count in ((page([result(sums)]), 1), (page([FIM, result(sums)]), 2)):
        Page(text)  # every tag is closed
        assert len(data(text)) == count
    Page(f"<html>{result(sums)._repr_html_()}</html>")


def test_names_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>\"'&<b>"
    made = result({f"{evil}.weight": torch.ones(3)}, model=evil, granularities={f"{evil}.weight": evil})
    text = page([made, made], [evil, "other"])
    Page(text)
    assert text.count("<script") == PAGE.count("<script")
    assert data(text)[0]["title"] == evil
    assert "alert(1)</b>" not in made._repr_html_()


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`results`"):
        page([])
    with pytest.raises(ValueError, match=r"`results`.*7"):
        page([FIM] * 7)
    with pytest.raises(TypeError, match=r"`results`.*TraceEstimate"):
        page([FIM.trace])
    for titles in (["a", "b"], "a"):
        with pytest.raises(ValueError, match="`titles`"):
            page([FIM], titles)
    with pytest.raises(FileNotFoundError, match="No folder"):
        write_page(tmp_path / "missing" / "page.html", [FIM])
    with pytest.raises(ValueError, match="`kind`"):
        FIM.plot("pie")
    assert list(tmp_path.iterdir()) == []


def test_a_result_reports_plots_and_shows_itself(tmp_path: Path) -> None:
    fim = nm.fisher_diagonal(MODEL, batches(16))
    path = fim.report(tmp_path / "page.html", fim.sum, titles=["one", "two"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text(encoding="utf-8") == page([fim, fim.sum], ["one", "two"])
    shown = fim._repr_html_()
    assert "DiagonalFisher (per sample)" in shown
    assert number(float(fim["2.weight"].double().sum() + fim["2.bias"].double().sum()) / 27) in shown
    assert "<script" not in shown
    assert len(fim.plot().axes) == 2


def test_the_depth_figure_draws_the_data_of_the_chart() -> None:
    figure = FIM.plot("depth")
    above, below = figure.axes
    drawn = [layer for layer in depth([summarize(FIM)]).series[0] if layer]
    assert above.lines[0].get_ydata().tolist() == [layer.mean for layer in drawn if layer.total]
    assert [bar.get_height() for bar in below.patches[: len(drawn)]] == [layer.zero_share for layer in drawn]
    assert len(result({"a": torch.zeros(2)}).plot("depth").axes) == 2
    assert len(result({}).plot("depth").axes) == 2


def test_without_matplotlib_the_page_is_offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for kind in ("histograms", "depth"):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'neuromanifold\[plots\]'"):
            FIM.plot(kind)
    assert FIM.report(tmp_path / "page.html").exists()


def test_results_are_compared_over_what_they_share() -> None:
    a, b = result(transformer(3)), result(transformer(4), count=20)
    assert repr(shared_comparison(a, b)) == repr(a.compare(b, epsilon=0))  # as text, since relmae is nan
    assert shared_comparison(a, result({"other": torch.ones(2)})) is None
    resized = result({**transformer(4), "classifier.bias": torch.ones(7)})
    found = shared_comparison(a, resized)
    assert found is not None
    assert found.entries == sum(value.numel() for value in a.values()) - 3
    assert "zero on all parameters" in page([result({name: 0 * value for name, value in a.sums.items()}), a])


def test_a_page_stays_small() -> None:
    layers = {f"net.layer.{i}.{part}.weight": torch.rand(8, 8) for i in range(48) for part in "abcdefgh"}
    assert len(page([result(layers)] * 3).encode()) < 5e6
