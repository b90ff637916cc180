"""The dense matrix, and dense blocks, against the definition."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.reference import network as reference
from tests.operators.dense import SOME, dense, relative_error
from tests.problem.test_unchanged import model as nosy
from tests.problem.test_unchanged import same, snapshot
from tests.problems.problem import Net, Problem
from tests.run.test_contract import MODEL, X, batches, network

F = reference.reference_matrix(MODEL, lambda m: m(X))
WHOLE = nm.fisher_matrix(MODEL, batches(16))
BLOCKS = nm.fisher_matrix(MODEL, batches(16), blocks="layer")


def matrix(problem: Problem, **options: Any) -> nm.FisherMatrix:
    return nm.fisher_matrix(
        problem.model, problem.data, likelihood=problem.likelihood, reduction="sum", **problem.options, **options
    )


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("name", SOME)
def test_it_is_that_of_the_definition(name: str) -> None:
    problem = SOME[name]
    whole, blocks = matrix(problem), matrix(problem, blocks="layer")
    assert relative_error(whole.dense(), dense(problem)) < problem.rtol
    expected = torch.zeros_like(dense(problem))
    for names in blocks.layout.layers().values():
        place = slice(whole.layout.slices[names[0]].start, whole.layout.slices[names[-1]].stop)
        expected[place, place] = dense(problem)[place, place]
    assert relative_error(blocks.dense(), expected) < problem.rtol


def block_diagonal() -> Tensor:
    return torch.block_diag(F[:40, :40], F[40:, 40:])


@pytest.mark.parametrize(("found", "sums"), [(WHOLE, F), (BLOCKS, block_diagonal())], ids=["dense", "blocks"])
@pytest.mark.parametrize("view", ["mean", "sum"])
def test_everything_agrees_with_the_dense_matrix(found: nm.FisherMatrix, sums: Tensor, view: str) -> None:
    found, expected = getattr(found, view), sums / (64 if view == "mean" else 1)
    torch.testing.assert_close(found.dense(), expected)
    assert found.trace.value == pytest.approx(float(expected.trace()))
    assert found.frobenius_norm == pytest.approx(float(expected.norm()))
    assert found.effective_rank == pytest.approx(float(expected.trace() ** 2 / expected.norm() ** 2))
    torch.testing.assert_close(found.diagonal()["2.bias"], expected.diagonal()[64:])
    torch.testing.assert_close(found.eigenvalues(), torch.linalg.eigvalsh(expected).flip(0), rtol=1e-8, atol=1e-12)
    pairs = found.eigenpairs(5)
    torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(expected).flip(0)[:5])
    torch.testing.assert_close(expected @ pairs.vectors, pairs.vectors * pairs.values)
    v = torch.randn(67, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(found @ v, expected @ v)
    damped = expected + 1e-3 * torch.eye(67, dtype=torch.float64)
    torch.testing.assert_close(found.solve(v, 1e-3).x, torch.linalg.solve(damped, v), rtol=1e-6, atol=1e-8)
    assert found.log_determinant(1e-3) == pytest.approx(float(torch.logdet(damped)))
    least = found.solve(expected @ v)
    torch.testing.assert_close(expected @ least.x, expected @ v, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        least.x, torch.linalg.pinv(expected, hermitian=True, rtol=1e-13) @ (expected @ v), rtol=1e-4, atol=1e-4
    )


def test_the_volume_element_of_a_layer() -> None:
    expected = float(torch.logdet(F[40:, 40:] / 64 + 1e-3 * torch.eye(27, dtype=torch.float64)))
    for found in (WHOLE, BLOCKS):
        layer = found.layer("2")
        assert list(layer.layout.shapes) == ["2.weight", "2.bias"]
        assert layer.log_determinant(1e-3) == pytest.approx(expected)
    with pytest.raises(ValueError, match="`name` must be one of"):
        WHOLE.layer("3")
    with pytest.raises(ValueError, match="`damping` must be a number > 0"):
        WHOLE.log_determinant(0)


def test_less_damping_than_rounding_is_warned_of() -> None:
    """log det(F + 1e-9 I) in float32 is that of F's rounding where F is singular."""
    found = nm.fisher_matrix(network().float(), [X[:4].float()])
    for call in (lambda: found.log_determinant(1e-9), lambda: found.solve(torch.ones(67), 1e-9)):
        with pytest.warns(UserWarning, match="less than rounding does to F"):
            call()
    found.log_determinant(1e-3)
    found.solve(torch.ones(67), 1e-3)
    nm.fisher_matrix(network(), [X[:4]]).log_determinant(1e-9)


def test_layers_by_name_with_parameters_of_the_model_and_without_entries() -> None:
    parts = {"scale": nn.Parameter(torch.tensor(2.0)), "a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}
    model = Net(lambda m, x: m.a(m.scale * x) + m.b(x), **parts).double()
    for layer in (model.a, model.b):
        layer.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        whole, blocks = nm.fisher_matrix(model, [X]), nm.fisher_matrix(model, [X], blocks="layer")
    for name in ("a", "b"):
        for found in (whole, blocks):
            assert list(found.layer(name).layout.shapes) == [f"{name}.weight", f"{name}.bias", f"{name}.nothing"]
        torch.testing.assert_close(whole.layer(name).dense(), blocks[name])
    assert whole.layer("").shape == (31, 31)
    assert blocks.layer("").shape == (1, 1)


def test_parameters_of_a_layer_may_lie_apart(tmp_path: Path) -> None:
    """In a dict of one's own: a.weight, b.weight, a.bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (3, 4), "b.weight": (2, 3), "a.bias": (3,)}
    given = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}

    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ p["a.weight"].T + p["a.bias"]) @ p["b.weight"].T

    whole, blocks = (nm.fisher_matrix(function, [X], parameters=given, blocks=b) for b in (None, "layer"))  # type: ignore
    apart = torch.tensor([*range(12), *range(18, 21)])
    expected, f = torch.zeros(21, 21, dtype=torch.float64), whole.dense()
    for index in (apart, torch.arange(12, 18)):
        expected[index[:, None], index] = f[index[:, None], index]
    blocks.save(tmp_path / "f.safetensors")
    for found in (blocks, nm.load(tmp_path / "f.safetensors")):
        torch.testing.assert_close(found.dense(), expected)
        torch.testing.assert_close(found @ f, expected @ f)
        for name, value in whole.diagonal().items():
            torch.testing.assert_close(found.diagonal()[name], value)
        pairs = found.eigenpairs(21)
        torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(expected).flip(0))
        torch.testing.assert_close(expected @ pairs.vectors, pairs.vectors * pairs.values)
        solution = found.solve(f[:, :2], damping=0.1).x
        torch.testing.assert_close(expected @ solution + 0.1 * solution, f[:, :2])
    for one in (whole, blocks):
        torch.testing.assert_close(one.layer("a").dense(), f[apart[:, None], apart])


def test_autocast_is_for_the_model_alone() -> None:
    found, v = nm.fisher_matrix(network().float(), [X.float()]), torch.ones(67)
    expected = found @ v, found.solve(v, 1e-2).x, found.estimate_diagonal().value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = found @ v, found.solve(v, 1e-2).x, found.estimate_diagonal().value
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_as_a_mapping() -> None:
    assert list(WHOLE) == [""]
    assert list(BLOCKS) == ["0", "2"]
    torch.testing.assert_close(BLOCKS["2"], F[40:, 40:] / 64)
    assert "2 blocks" in repr(BLOCKS)


@pytest.mark.parametrize(
    "estimator", [nm.Exact(nm.Upper()), nm.Empirical(), nm.Hutchinson(2, deflate=0), nm.MonteCarlo(3)], ids=repr
)
def test_other_estimators(estimator: nm.Estimator) -> None:
    found = nm.fisher_matrix(MODEL, batches(16), estimator, seed=2)
    expected = nm.fisher_diagonal(MODEL, batches(16), estimator, granularity="sample", seed=2)
    for name, value in found.diagonal().items():
        torch.testing.assert_close(value, expected[name])


def test_it_refuses_what_is_too_large_with_a_forecast() -> None:
    model = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 3))
    with pytest.raises(
        ValueError,
        match=r"`max_bytes` must be enough for F, got 54.7 GiB \(121,203 parameters squared\).*blocks='layer'",
    ):
        nm.fisher_matrix(model, [torch.ones(2, 400)])
    with pytest.raises(ValueError, match=r"most of it for the 120,300 parameters of '0'. Choose fewer"):
        nm.fisher_matrix(model, [torch.ones(2, 400)], blocks="layer")
    assert nm.fisher_matrix(model, [torch.ones(2, 400)], parameters="1.*").shape == (903, 903)
    with pytest.raises(ValueError, match=r"gradients of a batch of 1000 samples. Use smaller batches"):
        nm.fisher_matrix(model, [torch.ones(1000, 400)], parameters="1.*", max_bytes=903**2 * 4)
    with pytest.raises(ValueError, match="`blocks` must be None"):
        nm.fisher_matrix(MODEL, batches(16), blocks="module")
    with pytest.raises(ValueError, match="`dtype` must be"):
        nm.fisher_matrix(MODEL, batches(16), dtype=torch.float16)


def test_they_add_save_and_load(tmp_path: Path) -> None:
    halves = [nm.fisher_matrix(MODEL, [data], blocks="layer") for data in batches(32)]
    whole = halves[0] + halves[1]
    torch.testing.assert_close(whole.dense(), BLOCKS.dense())
    whole.save(tmp_path / "f.safetensors")
    again = nm.load(tmp_path / "f.safetensors")
    assert isinstance(again, nm.FisherMatrix)
    assert torch.equal(again.dense(), whole.dense())
    assert (again.layout, again.count, list(again)) == (whole.layout, 64, ["0", "2"])
    with pytest.raises(ValueError, match="a matrix of the same parameters"):
        WHOLE + BLOCKS


def test_float32_and_half_precision_models() -> None:
    assert nm.fisher_matrix(network().float(), [X.float()]).precision == torch.float32
    found = nm.fisher_matrix(network().bfloat16(), [X.bfloat16()], reduction="sum")
    assert found.precision == torch.float32
    assert relative_error(found.dense(), F) < 0.05


def test_nothing_changes() -> None:
    m = nosy()
    before = snapshot(m)
    nm.fisher_matrix(m, [torch.ones(4, 4)] * 2)
    assert same(before, snapshot(m))
