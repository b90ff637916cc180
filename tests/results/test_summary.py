"""Statistics of a summary against numpy on all entries at once."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import neuromanifold as nm
from neuromanifold.results import diagonal, summary
from neuromanifold.results.summary import Statistics, statistics, summarize
from tests.report.results import odd, result, transformer

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
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
    if positive.size:
        assert (one.median, one.p95) == pytest.approx(tuple(np.quantile(positive, [0.5, 0.95])), rel=1e-12)
        held = np.sort(x)[::-1].cumsum()[: math.ceil(one.halves * x.size)]
        assert held[-1] >= 0.5 * x.sum() * 0.98  # to the width of a bin
        assert held[-1] - np.sort(x)[::-1][held.size - 1] <= 0.5 * x.sum() * 1.02
    else:
        assert math.isnan(one.median)
        assert math.isnan(one.p95)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("view", ["mean", "sum"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_number_is_numpys(
    problem: str, view: str, chunk: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(summary._CHUNK, device, chunk)
    sums = PROBLEMS[problem]
    fim = result(sums) if view == "mean" else result(sums).sum
    made, names, trace = summarize(fim.to(device)), list(sums), values(fim, list(sums)).sum()
    check(made.everything, values(fim, names), trace, 0.1)
    assert [one.name for one in made.parameters] == names
    for one in made.parameters:
        check(one, values(fim, [one.name]), trace, 0.1)
        assert one.shape == tuple(sums[one.name].shape)
        assert one.granularity == "sample"
    for one in made.layers:
        check(one, values(fim, [n for n in names if (n.rpartition(".")[0] or n) == one.name]), trace, 0.1)
    for one in made.components:
        check(one, values(fim, [n for n in names if made.component_of[n] == one.name]), trace, 0.1)
    for group in (made.components, made.layers, made.parameters):
        assert sum(one.entries for one in group) == made.everything.entries
        assert sum(one.share for one in group) == pytest.approx(1 if trace else 0)


@given(
    st.lists(st.tuples(st.lists(st.floats(0, 2.0**100, width=32), max_size=20), st.booleans()), max_size=6),
    st.sampled_from([1, 3, 10**6]),
)
def test_quantiles_of_groups_are_those_of_all_entries_in_any_precision(
    parts: list[tuple[list[float], bool]], divisor: int
) -> None:
    """Zeros, ties, subnormal numbers, float32 beside float64: exact, as numpy's."""
    tensors = {f"{i}": torch.tensor(x, dtype=torch.float64 if d else torch.float32) for i, (x, d) in enumerate(parts)}
    x = np.concatenate([np.zeros(0), *(value.double().numpy() for value in tensors.values())]) / divisor
    positive = x[x > 0]
    found = statistics(tensors, {"all": list(tensors), "none": []}, divisor)
    assert (found["all"].entries, found["all"].entries - found["all"].zeros) == (x.size, positive.size)
    assert found["all"].total == pytest.approx(x.sum())
    expected = np.quantile(positive, [0.5, 0.95]) if positive.size else [math.nan] * 2
    assert [found["all"].median, found["all"].p95] == pytest.approx(list(expected), rel=1e-12, nan_ok=True)
    assert math.isnan(found["none"].median)


def test_a_negative_zero_is_a_zero() -> None:
    (one,) = statistics({"a": torch.tensor([-0.0, 0.0, 2.0])}, {"a": ["a"]}).values()
    assert (one.zeros, one.median, one.p95) == (2, 2.0, 2.0)


def test_a_row_says_what_is_random_and_what_is_not() -> None:
    assert summarize(result({"a.weight": torch.ones(4)})).rows()[0][-1] == "10 %"
    for estimator in ("Exact()", "Empirical()"):
        exact = result({"a.weight": torch.ones(4)}, noise=0, estimator=estimator)
        assert summarize(exact).rows()[0][-1] == "–"
        assert "–: not random" in str(exact)
        assert "±" not in str(exact.trace)
    assert "± 0.04 (standard error) per sample" in str(result({"a.weight": torch.ones(4)}).trace)
    rows = summarize(result(transformer())).rows(each=True)
    assert [row[0] for row in rows] == [*transformer(), "all"]


class _Copies(TorchDispatchMode):
    """Notes the entries of the largest tensor that is made, but for views."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.numel())
        return out


def test_beside_a_large_result_memory_holds_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the table that a command prints and for the trace: of eight billion entries a copy would be 32 GB."""
    monkeypatch.setitem(summary._CHUNK, "cpu", 1000)
    monkeypatch.setattr(diagonal, "_CHUNK", 1000)
    sums = {"a.weight": torch.rand(60_000, generator=torch.Generator().manual_seed(0)).view(300, 200)}
    fim = result(sums)
    with _Copies() as copies:
        table, trace = summarize(fim), fim.trace.sum
    assert copies.largest == 1 << 14  # the bins
    assert table.everything.total == pytest.approx(trace / fim.count)
    assert trace == pytest.approx(float(sums["a.weight"].double().sum()))
    with _Copies() as copies:
        sums["a.weight"].double().sum()
    assert copies.largest == 60_000  # it is seen


def test_the_diagonal_stays_as_it_was() -> None:
    fim = result(odd())
    before = {name: value.clone() for name, value in fim.sums.items()}
    summarize(fim)
    assert all(torch.equal(before[name], value) for name, value in fim.sums.items())


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_what_is_no_fisher_diagonal_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"`result`.*'a\.weight'"):
        summarize(result({"a.weight": torch.tensor([1.0, bad])}))
