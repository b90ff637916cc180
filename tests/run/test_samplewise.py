"""Where the sample-wise pullback is the same as other ways, compiled and in half precision too; and its slow path."""

import shutil
import warnings

import pytest
import torch
from torch import nn

import neuromanifold as nm
from tests.problems.problem import Net
from tests.run.test_contract import MODEL, X, Y, batches, network


def assert_same(a: nm.DiagonalFisher, b: nm.DiagonalFisher, rtol: float = 1e-12) -> None:
    assert (a.count, set(a)) == (b.count, set(b))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * float(b[name].abs().max()))


@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Empirical(), nm.Exact(nm.Lower(1))], ids=repr)
def test_batches_of_any_size_and_none(estimator: nm.Estimator) -> None:
    whole = nm.fisher_diagonal(MODEL, batches(64), estimator)
    for size in (1, 7, 64):
        assert_same(nm.fisher_diagonal(MODEL, batches(size), estimator), whole)
    empty = (X[:0], Y[:0])
    parts = batches(40)
    assert_same(nm.fisher_diagonal(MODEL, [empty, parts[0], empty, parts[1], empty], estimator), whole)


@pytest.mark.parametrize("estimator", [nm.Hutchinson(2, deflate=0), nm.Hutchinson(), nm.MonteCarlo(3)], ids=repr)
def test_sample_and_auto_are_the_same_where_all_have_rules(estimator: nm.Estimator) -> None:
    results = [nm.fisher_diagonal(MODEL, batches(16), estimator, granularity=g) for g in ("sample", "auto")]
    assert_same(*results, rtol=0)
    batchwise = nm.fisher_diagonal(MODEL, batches(16), estimator, granularity="batch")
    assert not torch.allclose(batchwise["0.weight"], results[0]["0.weight"])


def test_batches_of_one_sample_are_the_same_by_batch_and_by_sample() -> None:
    one = [nm.fisher_diagonal(MODEL, batches(1), nm.Hutchinson(deflate=0), granularity=g) for g in ("batch", "auto")]
    assert_same(*one)
    for name in one[0]:
        torch.testing.assert_close(one[0].stderr[name], one[1].stderr[name])


@pytest.mark.parametrize("size", [16, 64])
def test_the_trace_is_that_of_the_diagonal(size: int) -> None:
    for estimator in (nm.Exact(), nm.Empirical(), nm.Hutchinson(2, deflate=0), nm.MonteCarlo()):
        diagonal = nm.fisher_diagonal(MODEL, batches(size), estimator)
        trace = nm.fisher_trace(MODEL, batches(size), estimator)
        assert float(trace) == pytest.approx(float(diagonal.trace), rel=1e-12)


def _compiled(kind: str, backend: str) -> nn.Module:
    model = network()
    if kind == "whole":
        return torch.compile(model, backend=backend)  # type: ignore[return-value]
    if kind == "in place":
        model.compile(backend=backend)
    else:
        model[0] = torch.compile(model[0], backend=backend)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["whole", "in place", "a part"])
@pytest.mark.parametrize("warm", [False, True])
def test_compiled_models(kind: str, backend: str, warm: bool) -> None:
    """They run as written during an estimate, and compiled before and after."""
    if backend == "inductor" and (warm or shutil.which("g++") is None):
        pytest.skip("a warm inductor takes long" if warm else "no compiler")
    model = _compiled(kind, backend)
    before = model(X) if warm else None
    result = nm.fisher_diagonal(model, batches(32), nm.Exact())
    assert set(result.provenance.granularity.values()) == {"sample"}
    expected = nm.fisher_diagonal(network(), batches(32), nm.Exact())
    for name, value in zip(expected, result.values(), strict=True):
        torch.testing.assert_close(value, expected[name])
    if before is not None:
        assert torch.equal(model(X), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "estimator", [nm.Exact(), nm.Empirical(), nm.Hutchinson(2, deflate=0)], ids=lambda e: type(e).__name__
)
def test_half_precision(estimator: nm.Estimator, autocast: bool, dtype: torch.dtype) -> None:
    """Sums are float32; the error is that of the forward and backward passes in half precision."""

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Net(
                lambda m, x: m.head(m.norm(torch.tanh(m.a(x) + m.position)).mean(1)),
                a=nn.Linear(4, 8),
                norm=nn.LayerNorm(8),
                position=nn.Parameter(torch.randn(1, 4, 8)),
                head=nn.Linear(8, 3),
            )

    x, y = X.view(16, 4, 4).float(), Y[:16]
    reference = nm.fisher_diagonal(make().to(dtype).float(), [(x.to(dtype).float(), y)], estimator)
    if autocast:
        with torch.autocast("cpu", dtype=dtype):
            result = nm.fisher_diagonal(make(), [(x, y)], estimator)
    else:
        result = nm.fisher_diagonal(make().to(dtype), [(x.to(dtype), y)], estimator)
    assert set(result.provenance.granularity.values()) == {"sample"}
    for name in reference:
        assert result[name].dtype == torch.float32
        error = torch.linalg.vector_norm(result[name] - reference[name]) / torch.linalg.vector_norm(reference[name])
        assert error < (0.1 if dtype == torch.bfloat16 else 0.02), name


def test_the_slow_path_is_announced_once_with_its_parameters() -> None:
    model = Net(lambda m, x: m.head(x @ m.odd.square() + m.strange.cumsum(0)), odd=nn.Parameter(torch.ones(4, 4)))
    model.strange, model.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)
    model, data = model.double(), batches(16)
    for estimator, granularity in (
        (nm.Exact(), "auto"),
        (nm.Empirical(), "sample"),
        (nm.Hutchinson(deflate=0), "sample"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = nm.fisher_diagonal(model, data, estimator, granularity=granularity)
        told = [str(w.message) for w in caught if issubclass(w.category, nm.SlowPathWarning)]
        assert len(told) == 1
        for name in ("odd", "strange"):
            assert told[0].count(name) == 1
            assert result.provenance.granularity[name] == "sample, one by one"
        assert "head" not in told[0]
        assert [w.filename for w in caught if issubclass(w.category, nm.SlowPathWarning)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixed = nm.fisher_diagonal(model, data)
        nm.fisher_diagonal(MODEL, batches(16), nm.Exact())
    assert mixed.provenance.granularity["odd"] == "batch"
    assert mixed.provenance.granularity["head.weight"] == "sample"
