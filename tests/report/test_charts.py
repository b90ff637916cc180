"""The data that charts draw, and that they draw it."""

import math
import re

import pytest
import torch

from neuromanifold.report.depth import depth
from neuromanifold.report.formats import error, number
from neuromanifold.report.panels import octaves, panels
from neuromanifold.report.render import _environment
from neuromanifold.report.treemap import Tile, squarified, treemap
from neuromanifold.results.summary import summarize
from tests.report.results import odd, result, transformer

SUMMARY, OTHER = summarize(result(transformer()), "a"), summarize(result(transformer(1)), "b")


def draw(macro: str, *arguments: object) -> str:
    """One chart or table alone: a macro of macros.html."""
    return str(getattr(_environment().get_template("macros.html").module, macro)(*arguments))


def test_layers_stand_along_the_depth() -> None:
    data = depth([SUMMARY, OTHER])
    assert data.layers[0] == "net.embed.word_embeddings"
    assert data.layers[-1] == "classifier"
    assert [name for name, _, _ in data.bands] == [one.name for one in SUMMARY.components]
    assert data.bands[-1][2] == len(data.layers) == len(data.edges) - 1
    assert data.edges[0] == 0
    assert data.edges[-1] == pytest.approx(1)
    assert data.edges == sorted(data.edges)
    for row, summary in zip(data.series, (SUMMARY, OTHER), strict=True):
        assert row == summary.layers
    values = [v for row in data.series for s in row if s for v in (s.mean, s.median, s.p95) if v > 0]
    assert 10.0**data.low <= min(values) <= max(values) <= 10.0**data.high


def test_the_depth_chart_draws_its_data() -> None:
    data = depth([SUMMARY])
    text = draw("depth", data)
    alive = sum(s is not None and s.total > 0 for s in data.series[0])
    assert text.count('class="dot s0"') == text.count('class="whisker s0"') == alive
    assert text.count('class="hit"') == len(data.layers)
    heights = [
        float(h) for h in re.findall(r'class="bar s0"', text) and re.findall(r'height="([\d.]+)" class="bar', text)
    ]
    zeros = [100 * s.zero_share for s in data.series[0] if s]
    assert heights[len(zeros) :] == pytest.approx(zeros, abs=0.006)
    largest = max(s.share for s in data.series[0] if s)
    assert heights[: len(zeros)] == pytest.approx([100 * s.share / largest for s in data.series[0] if s], abs=0.006)
    dots = [float(y) for y in re.findall(r'd="M[\d.]+ ([\d.]+)h0"', text)]
    logs = [math.log10(s.mean) for s in data.series[0] if s and s.total]
    assert dots == pytest.approx([100 * (data.high - v) / (data.high - data.low) for v in logs], abs=0.006)


def test_results_of_different_networks_stand_side_by_side() -> None:
    data = depth([SUMMARY, summarize(result({"other.weight": torch.ones(3)}), "c")])
    assert data.layers[-1] == "other"
    assert data.series[0][-1] is None
    assert data.series[1][0] is None
    assert "other" in draw("depth", data)
    drawn = panels([SUMMARY, summarize(result({"other.weight": torch.ones(3)}), "c")])
    assert "not in the first result" in draw("panel", drawn[-1], "other")


@pytest.mark.parametrize(
    "sums", [transformer(), odd(), {"a.weight": torch.zeros(2)}, {}], ids=["net", "odd", "zero", "none"]
)
def test_histograms_hold_every_entry(sums: dict[str, torch.Tensor]) -> None:
    summary = summarize(result(sums))
    made = panels([summary])
    assert [one.component for one in made] == [one.name for one in summary.components if one.entries]
    assert len({(one.low, len(one.shares[0])) for one in made}) <= 1  # one axis for all
    for one, component in zip(made, [one for one in summary.components if one.entries], strict=True):
        assert sum(one.shares[0]) + component.zero_share == pytest.approx(1)
        positive = (
            torch.cat([sums[n].double().flatten() for n in sums if summary.component_of[n] == one.component]) / 10
        )
        for i, share in enumerate(one.shares[0][1:], one.low + 1):
            inside = (positive >= 2.0**i) & (positive < 2.0 ** (i + 1))
            assert share == pytest.approx(int(inside.sum()) / component.entries)
        assert octaves(summary)[one.component].total() == component.entries - component.zeros
        text = draw("panel", one, one.component)
        assert f"{component.entries:,} entries" in text
        assert ('class="rule mean"' in text) == (component.total > 0)


def test_the_bars_of_a_histogram_are_its_shares() -> None:
    (panel,) = panels([summarize(result({"a.weight": torch.tensor([0.0, 1.0, 1.5, 2.0, 5.0, 9.0, 17.0])}, count=1))])
    text = draw("panel", panel, "a")
    assert panel.low == 0
    assert panel.shares[0] == pytest.approx([2 / 7, 1 / 7, 1 / 7, 1 / 7, 1 / 7])
    area = re.search(r'd="([^"]+)" class="area s0"', text)
    assert area
    heights = [float(v) for v in re.findall(r"V([\d.]+)h", area[1])]
    assert heights == pytest.approx([4, 52, 52, 52, 52], abs=0.01)
    assert 'height="14.29" class="bar s0"' in text  # the zeros


@pytest.mark.parametrize(
    "shares", [[1.0], [0.5, 0.5], [6, 6, 4, 3, 2, 2, 1], [1.0, 1e-9], [1 / (i + 1) for i in range(200)]]
)
@pytest.mark.parametrize("aspect", [0.2, 1.0, 2.2])
def test_tiles_have_the_areas_of_their_shares_and_do_not_overlap(shares: list[float], aspect: float) -> None:
    boxes = squarified(shares, aspect)
    total = sum(shares)
    for (x, y, w, h), share in zip(boxes, shares, strict=True):
        assert w * h / 1e4 == pytest.approx(share / total, rel=1e-6)
        assert min(x, y) >= -1e-6
        assert max(x + w, y + h) <= 100 + 1e-6
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[:i]:
            assert x >= a + c - 1e-6 or a >= x + w - 1e-6 or y >= b + d - 1e-6 or b >= y + h - 1e-6
    assert squarified([], aspect) == []


def test_the_map_holds_the_whole_trace() -> None:
    tiles = treemap(SUMMARY)
    assert sum(tile.share for tile in tiles) == pytest.approx(1)
    for tile in tiles:
        assert tile.width * tile.height / 1e4 == pytest.approx(tile.share, rel=1e-6)
        if tile.tiles:
            assert sum(one.share for one in tile.tiles) == pytest.approx(tile.share)
    names = [one.name for tile in tiles for one in tile.tiles]
    assert "net.layer.1.key.bias" not in names  # zero has no area
    text = draw("treemap", tiles, "a", {})
    assert 'data-name="classifier.weight"' in text
    leaves: list[Tile] = [one for tile in tiles for one in tile.tiles]
    assert all(0 <= one.heat <= 1 for one in leaves)
    assert treemap(summarize(result({"a": torch.zeros(2)}))) == []


def test_small_parameters_share_a_tile() -> None:
    values = {"net.weight": torch.full((100,), 1.0), "net.a": torch.full((2,), 1e-3), "net.b": torch.full((2,), 2e-3)}
    (box,) = treemap(summarize(result(values)))
    assert [tile.name for tile in box.tiles] == ["net.weight", "2 smaller"]
    assert box.tiles[1].share == pytest.approx(0.006 / 100.006)
    assert box.tiles[1].tip.startswith("2 smaller parameters\n<")
    assert 0 <= box.tiles[1].heat <= box.tiles[0].heat


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'a.b<.c'|dotted }}", "a.<wbr>b&lt;.<wbr>c"),
        ("{{ 'a `b<c` & d'|prose }}", "a <code>b&lt;c</code> &amp; d"),
        ("<b title=\"{{ '<\\x22>' }}\">", '<b title="&lt;&#34;&gt;">'),
        ("{{ 1.0|at }} {{ 0.126|at }} {{ 0.001|at }}", "1 0.13 0"),
    ],
)
def test_everything_that_a_template_is_given_is_escaped(template: str, text: str) -> None:
    assert _environment().from_string(template).render() == text


def test_what_is_not_random_has_no_error_of_zero() -> None:
    assert error(0.0) == "–"
    assert error(0.023) == "2.3\u00a0%"
    exact = depth([summarize(result(transformer(), noise=0), "a")])
    assert all("0 %" not in tip.split("\n")[1] for _, _, tip in exact.tips)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1072.4, "1,070"),
        (0.0123, "0.0123"),
        (1.8442e-5, "1.84×10⁻⁵"),
        (9.999e-5, "1.00×10⁻⁴"),
        (3.2e12, "3.20×10¹²"),
        (2.5, "2.50"),
        (float("nan"), "–"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert number(value) == text
