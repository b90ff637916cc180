"""Statistics of a summary against numpy on all entries at once."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import neuromanifold as nm
from neuromanifold.report import tally
from neuromanifold.report.summary import Statistics, agreement, blocks, in_view_of, short_names, summarize
from neuromanifold.report.tally import Tally
from tests.report.results import odd, result, transformer

PROBLEMS = {"transformer": transformer(), "odd": odd(), "empty": {}, "only zero": {"a.weight": torch.zeros(3)}}


def values(fim: nm.DiagonalFisher, names: list[str]) -> np.ndarray:
    parts = [fim.sums[name].double().flatten().numpy() for name in names]
    return np.concatenate([np.zeros(0), *parts]) / (fim.count if fim.reduction == "mean" else 1)


def check(one: Statistics, x: np.ndarray, trace: float, noise: float) -> None:
    positive = x[x > 0]
    assert (one.entries, one.zeros) == (x.size, x.size - positive.size)
    assert one.total == pytest.approx(x.sum())
    assert one.noise == pytest.approx(noise * x.sum(), rel=0.01)  # its tensors have fewer digits
    assert one.mean == pytest.approx(x.mean() if x.size else 0)
    assert one.zero_share == pytest.approx((x == 0).mean() if x.size else 0)
    assert one.share == pytest.approx(x.sum() / trace if trace else 0)
    assert one.largest == pytest.approx(x.max(initial=0))
    assert sum(one.octaves.values()) == positive.size
    for e, n in one.octaves.items():
        assert n == ((positive >= 2.0**e) & (positive < 2.0 ** (e + 1))).sum()
    if positive.size:
        assert (one.median, one.p95) == pytest.approx(tuple(np.quantile(positive, [0.5, 0.95])), rel=1e-12)
        held = np.sort(x)[::-1].cumsum()[: math.ceil(one.halves * x.size)]
        assert held[-1] >= 0.5 * x.sum() * 0.98  # to the width of a bin
        assert held[-1] - np.sort(x)[::-1][held.size - 1] <= 0.5 * x.sum() * 1.02
    else:
        assert math.isnan(one.median)
        assert math.isnan(one.p95)


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("view", ["mean", "sum"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_number_is_numpys(problem: str, view: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "_CHUNK", chunk)
    sums = PROBLEMS[problem]
    fim = result(sums) if view == "mean" else result(sums).sum
    made, names, trace = summarize(fim), list(sums), values(fim, list(sums)).sum()
    check(made.everything, values(fim, names), trace, 0.1)
    assert [one.name for one in made.parameters] == names
    for one in made.parameters:
        check(one, values(fim, [one.name]), trace, 0.1)
        assert one.shape == tuple(sums[one.name].shape)
        assert one.way == "sample"
    for one in made.layers:
        check(one, values(fim, [n for n in names if (n.rpartition(".")[0] or n) == one.name]), trace, 0.1)
    for one in made.components:
        check(one, values(fim, [n for n in names if made.component_of[n] == one.name]), trace, 0.1)
    for group in (made.components, made.layers, made.parameters):
        assert sum(one.entries for one in group) == made.everything.entries
        assert sum(one.share for one in group) == pytest.approx(1 if trace else 0)


@given(
    st.lists(st.lists(st.floats(0, 2.0**100, width=32), max_size=20), max_size=6),
    st.sampled_from([0.0, 0.31, 0.5, 1.0]),
)
def test_tallies_of_parts_merge_to_that_of_the_whole(parts: list[list[float]], share: float) -> None:
    together = Tally()
    for part in parts:
        one = Tally()
        one.add(np.array(part, np.float64))
        together.merge(one)
    x = np.array([value for part in parts for value in part], np.float64)
    positive = x[x > 0]
    assert (together.entries, together.positive) == (x.size, positive.size)
    assert together.total == pytest.approx(x.sum())
    needed = together.bins_for([share])
    picked = positive[[b in needed for b in tally.bins_of(positive)]]
    expected = np.quantile(positive, share) if positive.size else math.nan
    assert together.quantile(share, picked) == pytest.approx(expected, nan_ok=True)


def test_rows_that_were_never_looked_up_are_counted() -> None:
    rows = {one.name: one.zero_rows for one in summarize(result(PROBLEMS["transformer"])).parameters}
    assert rows["net.embed.word_embeddings.weight"] == 40
    assert rows["classifier.weight"] == rows["classifier.bias"] == rows["net.layer.1.key.bias"] == 0


def test_the_diagonal_stays_as_it_was() -> None:
    fim = result(odd())
    before = {name: value.clone() for name, value in fim.sums.items()}
    summarize(fim)
    assert all(torch.equal(before[name], value) for name, value in fim.sums.items())


def test_components_are_embeddings_blocks_and_head() -> None:
    assert list(blocks(list(transformer()))) == [
        "net.embed.word_embeddings",
        "net.layer.0",
        "net.layer.1",
        "classifier",
    ]
    assert list(blocks(["0.weight", "0.bias", "2.weight"])) == ["0", "2"]
    assert list(blocks(["a10.weight", "weight"])) == ["a10", "weight"]
    many = [f"module_{'x' * i}.part.weight" for i in range(1, 80)]
    assert sum(map(len, blocks(many).values())) == 79


def test_short_names_stay_apart() -> None:
    names = ["bert.layer.0", "bert.layer.1", "bert.pooler.dense", "head"]
    among = ["bert.layer.0.dense", "bert.layer.1.dense"]
    short = short_names(names, among)
    assert list(short.values()) == ["layer.0", "layer.1", "pooler.dense", "head"]
    assert short_names(["0", "2"]) == {"0": "0", "2": "2"}
    assert short_names(["a.x", "b.x", "x"]) == {"a.x": "a.x", "b.x": "b.x", "x": "x"}


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_what_is_no_fisher_diagonal_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"`result`.*'a\.weight'"):
        summarize(result({"a.weight": torch.tensor([1.0, bad])}))


def test_agreement_is_that_of_compare() -> None:
    a, b = result(transformer(3)), result(transformer(4), count=20)
    ours, theirs = agreement(a, b), a.compare(b, epsilon=0)
    assert ours.parameters == len(a)
    assert ours.ratio == pytest.approx(theirs.mean_ratio)
    assert ours.cosine == pytest.approx(theirs.cosine)
    assert ours.difference == pytest.approx(theirs.relmae_positive)
    assert agreement(in_view_of(a.sum, b), b) == ours
    assert agreement(a, result({"other": torch.ones(2)})).parameters == 0
    resized = result({**transformer(4), "classifier.bias": torch.ones(7)})
    assert agreement(a, resized).parameters == len(a) - 1
    assert math.isnan(agreement(a, result({name: 0 * value for name, value in a.sums.items()})).difference)
