"""The data of the histograms against a naive count, and that the plot shows it."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.patches import Rectangle, StepPatch
from torch import Tensor

from neuromanifold.report.plots import Histogram, histograms, plot_histograms, save_figure

GENERATOR = torch.Generator().manual_seed(0)
VALUES: dict[str, Tensor] = {
    "first.weight": torch.randn(30, 7, generator=GENERATOR).relu().square(),
    "first.bias": torch.zeros(7),
    "dead.weight": torch.zeros(5),
    "single.weight": torch.tensor([1e-3]),
    "huge.weight": 10 ** (-44 + 60 * torch.rand(500, generator=GENERATOR, dtype=torch.float64)),
    "empty.weight": torch.zeros(0),
    "alike.weight": torch.full((9,), 2.0),
}
OTHERS = {name: 3 * value for name, value in VALUES.items()} | {"dead.weight": torch.ones(5)}


def entries(component: str, values: dict[str, Tensor] = VALUES) -> list[float]:
    return [x for name, value in values.items() if name.split(".")[0] == component for x in value.flatten().tolist()]


def naive_counts(histogram: Histogram, values: list[float]) -> list[int]:
    edges = histogram.edges.tolist()
    return [sum(low <= x < high for x in values) for low, high in pairwise(edges)]


@pytest.mark.parametrize("bins", [1, 7, 40])
@pytest.mark.parametrize("span", [None, OTHERS], ids=["alone", "spanning another"])
def test_every_number_is_that_of_a_naive_count(bins: int, span: dict[str, Tensor] | None) -> None:
    made = histograms(VALUES, bins=bins, span=span)
    assert [one.component for one in made] == ["first", "dead", "single", "huge", "alike"]  # empty is left out
    for one in made:
        values = entries(one.component)
        positive = sorted(x for x in values if x > 0)
        assert one.statistics.entries == len(values)
        assert one.statistics.zero_share == pytest.approx(values.count(0) / len(values))
        assert one.statistics.mean == pytest.approx(sum(values) / len(values))
        assert one.shares.sum().item() + one.statistics.zero_share == pytest.approx(1)
        if positive:
            assert one.edges.shape == (bins + 1,)
            assert int(one.counts.sum()) == len(positive)
            naive = naive_counts(one, positive)
            ends = {0, bins - 1}  # the extreme entries stand on the outer edges, where rounding decides
            assert all(int(one.counts[i]) == naive[i] for i in range(bins) if i not in ends)
            assert all(0 <= int(one.counts[i]) - naive[i] <= 1 for i in ends) or bins == 1
            ratios = one.edges[1:] / one.edges[:-1]
            torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
            assert positive[0] <= one.statistics.median <= one.statistics.p95 <= positive[-1]
            assert sum(x <= one.statistics.median for x in positive) * 2 >= len(positive)
            assert sum(x <= one.statistics.p95 for x in positive) >= math.floor(0.95 * len(positive))
        elif span is None:
            assert one.edges.numel() == one.counts.numel() == 0
            assert math.isnan(one.statistics.median)


def test_bins_reach_over_at_least_a_decade_and_over_the_other_mapping() -> None:
    alone, spanning = ({one.component: one for one in histograms(VALUES, span=span)} for span in (None, OTHERS))
    for component in ("single", "alike"):
        edges = alone[component].edges
        assert edges[-1].item() / edges[0].item() == pytest.approx(10)
    assert spanning["first"].edges[-1].item() == pytest.approx(max(entries("first", OTHERS)))
    assert spanning["first"].edges[0].item() == pytest.approx(min(x for x in entries("first") if x > 0))
    swapped = {one.component: one for one in histograms(OTHERS, span=VALUES)}
    for component, one in spanning.items():
        assert torch.equal(one.edges, swapped[component].edges)


def test_what_is_no_fisher_diagonal_is_refused() -> None:
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="Fisher diagonal"):
            histograms({"a.weight": torch.tensor([1.0, bad])})
    with pytest.raises(ValueError, match="span"):
        histograms({"a.weight": torch.ones(2)}, span={"b.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="bins"):
        histograms({"a.weight": torch.ones(2)}, bins=0)
    with pytest.raises(ValueError, match="over"):
        plot_histograms(histograms(VALUES), histograms({"a.weight": torch.ones(2)}))


def test_the_plot_shows_the_data(tmp_path: Path) -> None:
    drawn, over = histograms(VALUES, span=OTHERS), histograms(OTHERS, span=VALUES)
    figure = plot_histograms(drawn, over, "this", "that")
    panels = dict(zip([one.component for one in drawn], figure.axes, strict=False))
    for one, other in zip(drawn, over, strict=True):
        axes = panels[one.component]
        filled, outline = [patch.get_data() for patch in axes.patches if isinstance(patch, StepPatch)]
        assert torch.equal(torch.as_tensor(filled.values), one.shares)
        assert torch.equal(torch.as_tensor(outline.values), other.shares)
        assert torch.equal(torch.as_tensor(filled.edges), one.edges)
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert [bar.get_height() for bar in bars] == [1, one.statistics.zero_share]  # in a frame of height 1
        lines = {line.get_label(): line.get_xdata()[0] for line in axes.lines}
        assert lines.get("mean μ", one.statistics.mean) == one.statistics.mean
        assert ("median of $F_{ii} > 0$" in lines) == (one.statistics.median > 0)
        assert lines.get("median of $F_{ii} > 0$", one.statistics.median) == pytest.approx(
            one.statistics.median, nan_ok=True
        )
        assert lines.get("$p_{95}$ of $F_{ii} > 0$", one.statistics.p95) == pytest.approx(
            one.statistics.p95, nan_ok=True
        )
        left, right = axes.get_xlim()
        assert axes.get_xscale() == "log"
        assert left < one.edges[0] < one.edges[-1] < right
        assert all(x >= one.edges[0] for x in axes.get_xticks())  # none under the bar of zeros
    assert "ζ = 100 %" in panels["dead"].get_title()
    (legend,) = figure.legends
    assert {"this", "that", "mean μ"} <= {text.get_text() for text in legend.get_texts()}
    assert save_figure(figure, tmp_path / "histograms.png").stat().st_size > 5000


def test_all_zero_or_nothing_at_all_can_be_drawn(tmp_path: Path) -> None:
    figure = plot_histograms(histograms({"a.weight": torch.zeros(3)}))
    assert [text.get_text() for text in figure.axes[0].texts] == ["all zero", "0"]
    assert save_figure(figure, tmp_path / "zero.png").exists()
    assert save_figure(plot_histograms(histograms({})), tmp_path / "nothing.png").exists()
