"""Results as values: they print, add, filter, compare, and survive a file."""

import pytest
import torch
from torch import nn

import neuromanifold as nm
from neuromanifold.results.naming import components
from tests.run.test_contract import MODEL, X, Y, batches, network

RESULT = nm.fisher_diagonal(MODEL, batches(16), seed=1)
TRACE = nm.fisher_trace(MODEL, batches(16), seed=1)


def test_it_is_a_mapping_of_the_parameters_shapes() -> None:
    assert list(RESULT) == [name for name, _ in MODEL.named_parameters()]
    assert len(RESULT) == 4
    for name, parameter in MODEL.named_parameters():
        assert RESULT[name].shape == RESULT.stderr[name].shape == parameter.shape
    with pytest.raises(KeyError):
        RESULT["nothing"]


def test_it_prints_as_a_table() -> None:
    lines = str(RESULT).splitlines()
    assert lines[0] == "DiagonalFisher (per sample)"
    assert lines[1].split() == [
        "component",
        "parameters",
        "zero",
        "mean",
        "median",
        ">",
        "0",
        "p95",
        ">",
        "0",
        "rel.",
        "s.e.",
    ]
    rows = {line.split()[0]: line.split() for line in lines[3:6]}
    weights = torch.cat([RESULT["2.weight"].flatten(), RESULT["2.bias"].flatten()])
    assert rows["2"][1:5] == ["27", "0.0", "%", f"{weights.mean():.3g}"]
    assert rows["2"][5] == f"{weights.quantile(0.5):.3g}"
    assert rows["2"][6] == f"{weights.quantile(0.95):.3g}"
    assert "64 samples, 4 batches (2 verified), 4 passes" in lines[-1]
    assert "Hutchinson(probes=1" in lines[-1]
    assert "unbiased" in lines[-1]


def test_components_go_as_deep_as_stays_readable() -> None:
    names = [f"encoder.layer.{i}.{part}.weight" for i in range(12) for part in ("query", "key", "value")] + [
        "head.bias"
    ]
    groups = components(names)
    assert len(groups) == 13
    assert list(groups)[:2] == ["encoder.layer.0", "encoder.layer.1"]
    assert sum(map(len, groups.values())) == len(names)
    assert components(["weight", "bias"]) == {"weight": ["weight"], "bias": ["bias"]}


def test_zeros_and_empty_parameters_print() -> None:
    model = nn.Module()
    model.used, model.unused, model.empty = nn.Linear(4, 2), nn.Linear(2, 2), nn.Parameter(torch.zeros(0))
    model.forward = lambda x: model.used(x)
    text = str(nm.fisher_diagonal(model, [X.float()]))
    assert "100.0 %" in text


def test_filter_to_and_compare() -> None:
    assert list(RESULT.filter("*.bias")) == ["0.bias", "2.bias"]
    assert RESULT.to(torch.float32)["0.weight"].dtype == torch.float32
    with pytest.raises(ValueError, match="`patterns`"):
        RESULT.filter("encoder.*")
    same = RESULT.compare(RESULT)
    assert (same.relmae, same.mae, same.mean_ratio) == (0, 0, 1)
    assert same.cosine == pytest.approx(1)
    assert same.rank_correlation == pytest.approx(1)
    doubled = {name: 2 * value for name, value in RESULT.items()}
    assert RESULT.compare(doubled).relmae == pytest.approx(0.5)
    assert RESULT.compare(doubled).mean_ratio == pytest.approx(0.5)
    assert "RelMAE 0.5" in str(RESULT.compare(doubled))
    with pytest.raises(ValueError, match=r"`other`.*same parameters"):
        RESULT.compare({"0.weight": RESULT["0.weight"]})


def test_rank_correlation_shares_ranks_among_ties() -> None:
    a, b = {"w": torch.tensor([1.0, 2.0, 2.0, 5.0])}, {"w": torch.tensor([3.0, 1.0, 4.0, 4.0])}
    ranks = torch.tensor([[1.0, 2.5, 2.5, 4.0], [2.0, 1.0, 3.5, 3.5]])
    from neuromanifold.results.comparison import compare

    assert compare(a, b, 1e-12).rank_correlation == pytest.approx(float(torch.corrcoef(ranks)[0, 1]))


def test_only_like_adds_to_like() -> None:
    with pytest.raises(ValueError, match="estimator"):
        RESULT + nm.fisher_diagonal(MODEL, batches(16), nm.MonteCarlo())
    with pytest.raises(ValueError, match="same parameters"):
        RESULT + RESULT.filter("0.*")
    with pytest.raises(TypeError):
        RESULT + 1
    other = nm.fisher_trace(MODEL, batches(16), seed=2)
    total = sum([TRACE, other])
    assert total.count == 128
    assert float(total) == pytest.approx((float(TRACE) + float(other)) / 2)
    assert total.stderr == pytest.approx((TRACE.stderr**2 + other.stderr**2) ** 0.5 / 2)
    assert total.provenance.seeds == [1, 2]


def test_results_of_the_same_seed_share_their_noise_and_say_so() -> None:
    """Two shards with one seed draw the same signs: their errors add, they do not cancel."""
    halves = [nm.fisher_diagonal(MODEL, [x], seed=0) for x in X.split(32)]
    with pytest.warns(UserWarning, match=r"same seed.*seed=rank"):
        both = halves[0] + halves[1]
    expected = halves[0].sum.stderr["0.weight"] + halves[1].sum.stderr["0.weight"]
    torch.testing.assert_close(both.sum.stderr["0.weight"], expected)
    traces = [nm.fisher_trace(MODEL, [x], seed=0) for x in X.split(32)]
    with pytest.warns(UserWarning, match="same seed"):
        assert sum(traces).stderr == pytest.approx((traces[0].stderr + traces[1].stderr) / 2)
    apart = [nm.fisher_diagonal(MODEL, [x], seed=i) for i, x in enumerate(X.split(32))]
    assert sum(apart).provenance.seeds == [0, 1]


def test_views_and_shapes_are_not_mixed_up() -> None:
    with pytest.raises(ValueError, match="same view"):
        RESULT.compare(RESULT.sum)
    with pytest.raises(ValueError, match=r"0\.bias"):
        RESULT.compare({name: value.reshape(-1, 1) if name == "0.bias" else value for name, value in RESULT.items()})
    for dtype in (torch.float16, torch.int64):
        with pytest.raises(ValueError, match="`target`"):
            RESULT.to(dtype)


def test_gradients_that_grow_keep_their_error_bars() -> None:
    """A saturated first batch must not set the unit of the fourth powers for good."""
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [0.0]]))
    data = [torch.tensor([[60.0]]), torch.tensor([[0.5]])]
    forward, backward = (nm.fisher_diagonal(model, d, nm.Hutchinson(deflate=0), seed=0) for d in (data, data[::-1]))
    torch.testing.assert_close(forward.stderr["weight"], backward.stderr["weight"])


def test_small_gradients_keep_their_error_bars() -> None:
    """g⁴ of a gradient of 1e-12 is zero in float32; the standard error must not be."""
    model = network().float()
    with torch.no_grad():
        model[2].weight.mul_(1e-10)
    result = nm.fisher_diagonal(model, [(X.float(), Y)], nm.Hutchinson(deflate=0))
    reference = nm.fisher_diagonal(model.double(), [(X, Y)], nm.Hutchinson(deflate=0))
    assert (result["0.weight"] > 0).all()
    ratio = result.stderr["0.weight"] / result["0.weight"]
    torch.testing.assert_close(ratio.double(), reference.stderr["0.weight"] / reference["0.weight"], rtol=1e-3, atol=0)


def test_results_of_other_weights_do_not_add() -> None:
    other = network()
    with torch.no_grad():
        other[0].bias[0] += 1e-3
    mine, theirs = (nm.fisher_diagonal(model, [X], seed=k) for k, model in enumerate((network(), other)))
    with pytest.raises(ValueError, match="same weights"):
        mine + theirs
    assert (mine + nm.fisher_diagonal(network(), [X], seed=2)).count == 2 * len(X)
