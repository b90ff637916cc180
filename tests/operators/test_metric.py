"""What follows from products with a matrix: geometry, eigenpairs, solutions, estimates of trace and diagonal."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.operators.krylov import orthonormal
from neuromanifold.operators.layout import ParameterLayout
from neuromanifold.operators.metric import Metric, NotConvergedWarning
from tests.zscores import allowed_z_score, worst_z_score

DOUBLE = torch.float64


class Dense(Metric):
    """A matrix, and how often it was multiplied with a block."""

    def __init__(self, matrix: Tensor, count: int = 1) -> None:
        self.matrix, self.products, self._samples = matrix, 0, count
        half = len(matrix) // 2
        self.layout = ParameterLayout({"a": torch.Size([half]), "b": torch.Size([1, len(matrix) - half])})
        self.reduction, self.precision, self.device = "sum", matrix.dtype, matrix.device

    @property
    def count(self) -> int:
        return self._samples

    def _product(self, block: Tensor) -> Tensor:
        self.products += 1
        return self.matrix @ block


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator(seed), dtype=DOUBLE))[0]
    return (turn * values.to(DOUBLE)) @ turn.mT


SPECTRA = {
    "decaying": torch.logspace(2, -6, 60),
    "flat": torch.linspace(1, 1.2, 40),
    "ties": torch.tensor([3.0] * 3 + [2.0] * 4 + [1.0] * 20),
    "low rank": torch.tensor([5.0, 1.0, 0.1] + [0.0] * 50),
    "one": torch.tensor([2.0]),
    "two": torch.tensor([2.0, 0.0]),
    "zero": torch.zeros(12),
    "tiny": 1e-20 * torch.logspace(0, -3, 50),
    "huge": 1e20 * torch.logspace(0, -3, 50),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigenpairs(name: str, k: int, dtype: torch.dtype) -> None:
    values = SPECTRA[name].to(DOUBLE).sort(descending=True).values
    k = min(k, len(values))
    matrix = with_spectrum(values)
    found = Dense(matrix.to(dtype)).eigenpairs(k)
    scale, eps = float(values[0]), torch.finfo(dtype).eps
    assert found.vectors.shape == (len(values), k)
    torch.testing.assert_close(found.values.double(), values[:k], rtol=0, atol=2 * math.sqrt(eps) * scale)
    gram = found.vectors.mT @ found.vectors
    torch.testing.assert_close(gram, torch.eye(k, dtype=dtype), rtol=0, atol=100 * eps)
    residuals = (matrix @ found.vectors.double() - found.vectors.double() * found.values.double()).norm(dim=0)
    torch.testing.assert_close(found.residuals.double(), residuals, rtol=0.1, atol=100 * eps * scale)
    assert float(found.residuals.max()) <= 2 * math.sqrt(eps) * scale
    assert f"{k} largest" in str(found)


def test_eigenpairs_restart_and_stay_accurate() -> None:
    values = torch.linspace(1, 0.5, 400, dtype=DOUBLE)  # hardly any gaps, so that the basis has to be shrunk many times
    found = Dense(with_spectrum(values)).eigenpairs(3, tol=1e-9, maxiter=300)
    torch.testing.assert_close(found.values, values[:3], rtol=1e-10, atol=0)
    assert found.products > 4 * 3 + 32


def test_eigenpairs_that_have_not_converged_say_so() -> None:
    metric = Dense(with_spectrum(torch.linspace(1, 0.5, 300)))
    with pytest.warns(NotConvergedWarning, match="after 2 iterations a residual"):
        found = metric.eigenpairs(2, maxiter=2)
    assert float(found.residuals.max()) > 1e-3


def test_the_same_seed_gives_the_same_eigenpairs() -> None:
    metric = Dense(with_spectrum(torch.logspace(0, -3, 30)))
    assert torch.equal(metric.eigenpairs(2, seed=1).vectors, metric.eigenpairs(2, seed=1).vectors)


def test_orthonormal_leaves_out_what_is_there_already() -> None:
    basis = orthonormal(torch.randn(20, 3, generator=generator(), dtype=DOUBLE))
    new = torch.randn(20, 1, generator=generator(1), dtype=DOUBLE)
    added = orthonormal(torch.cat([basis @ torch.ones(3, 1, dtype=DOUBLE), new, 2 * new, 0 * new], 1), basis)
    assert added.shape == (20, 1)
    assert float((basis.mT @ added).abs().max()) < 1e-15
    assert orthonormal(new, torch.eye(20, dtype=DOUBLE)).shape == (20, 0)


@pytest.mark.parametrize("damping", [0.0, 1e-3, 1.0])
def test_conjugate_gradients(damping: float) -> None:
    matrix = with_spectrum(torch.logspace(1, -2, 30))
    metric = Dense(matrix)
    rhs = torch.randn(30, 4, generator=generator(), dtype=DOUBLE)
    rhs[:, 2] = 0
    found = metric.solve(rhs, damping, tol=1e-10)
    expected = torch.linalg.solve(matrix + damping * torch.eye(30, dtype=DOUBLE), rhs)
    torch.testing.assert_close(found.x, expected, rtol=1e-6, atol=1e-8)
    assert found.residual <= 1e-10
    assert metric.products == found.iterations
    tiny = Dense(matrix.float()).solve(1e-25 * rhs.float(), damping).x  # whose squares are not float32
    torch.testing.assert_close(1e25 * tiny.double(), expected, rtol=1e-2, atol=1e-2)
    one = metric.natural_gradient(metric.layout.split(rhs[:, 0]), damping=1.0)
    assert set(one) == {"a", "b"}
    exact = torch.linalg.solve(matrix + torch.eye(30, dtype=DOUBLE), rhs[:, 0])
    torch.testing.assert_close(one["b"].flatten(), exact[15:], rtol=1e-3, atol=1e-4)


def test_a_solution_that_has_not_converged_says_so() -> None:
    metric = Dense(with_spectrum(torch.logspace(3, -3, 50)))
    with pytest.warns(NotConvergedWarning, match="after 3 iterations of conjugate gradients"):
        assert metric.solve(torch.ones(50, dtype=DOUBLE), maxiter=3).residual > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_damping_the_iteration_ends_in_the_kernel(dtype: torch.dtype) -> None:
    """It would go on to the last round, each of which is a pass over the data, and x would grow to 1e12."""
    metric = Dense(with_spectrum(SPECTRA["low rank"]).to(dtype))
    with pytest.warns(NotConvergedWarning):
        found = metric.solve(torch.ones(53, dtype=dtype))
    assert found.iterations < 10
    assert float(found.x.norm()) < 1e6
    inside = metric.matrix @ torch.ones(53, dtype=dtype)
    assert metric.solve(inside).residual < 1e-5


def test_geometry() -> None:
    metric = Dense(torch.diag(torch.tensor([4.0, 1.0, 0.0, 9.0], dtype=DOUBLE)), count=4)
    e = torch.eye(4, dtype=DOUBLE)
    assert metric.length(e[0]) == 2
    assert metric.mean.length(e[0]) == 1
    assert metric.length(e[2]) == 0
    assert metric.inner(e[0] + e[1], e[1] - e[0]) == -3
    assert metric.angle(e[0], e[1]) == pytest.approx(math.pi / 2)
    assert metric.angle(e[0], -3 * e[0]) == pytest.approx(math.pi)
    assert metric.angle(e[0] + e[2], e[0]) == pytest.approx(0, abs=1e-7)
    assert metric.length({"a": torch.tensor([0.0, 2.0]), "b": torch.zeros(1, 2)}) == 2
    assert metric.length(np.array([0.0, 0.0, 1.0, 1.0])) == 3
    with pytest.raises(ValueError, match=r"`v` must be a direction of positive length.*no angle"):
        metric.angle(e[0], e[2])
    with pytest.raises(ValueError, match="`step` must be one vector, got a block of 4"):
        metric.length(e)


def test_vectors_come_back_in_kind() -> None:
    metric = Dense(with_spectrum(torch.logspace(0, -1, 6)).float())
    v = torch.ones(6)
    assert torch.equal(metric @ v, metric.matrix @ v)
    assert isinstance(metric @ v.double().numpy(), np.ndarray)
    assert (metric @ v.numpy()).dtype == metric.dtype == np.float32
    assert (metric.matvec(v[:, None].numpy())).shape == (6, 1)
    assert (metric.rmatvec(v), metric.matmat(v))[0].equal(metric @ v)
    assert np.array_equal(metric @ np.arange(6.0)[::-1], metric @ np.arange(6.0)[::-1].copy())
    fixed = np.ones(6)
    fixed.flags.writeable = False
    assert np.array_equal(metric @ fixed, (metric @ v).numpy())
    by_name = metric @ metric.layout.split(v)
    assert by_name["b"].shape == (1, 3)
    assert torch.equal(metric.layout.flatten(by_name, torch.float32, torch.device("cpu")), metric @ v)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("biased", [False, True])
def test_trace_and_diagonal_are_unbiased(method: str, biased: bool) -> None:
    """Over 300 seeds, at a false-alarm rate of 1e-6; the twin that sees a matrix 10 % larger must fail."""
    matrix = with_spectrum(torch.logspace(1, -2, 12))
    metric = Dense(matrix * (1.1 if biased else 1.0))
    traces = torch.tensor([metric.estimate_trace(method, 8, seed).value for seed in range(300)], dtype=DOUBLE)
    diagonals = torch.stack([metric.estimate_diagonal(method, 8, seed).value for seed in range(300)])
    worst = max(worst_z_score(traces, matrix.trace()), worst_z_score(diagonals, matrix.diagonal()))
    assert (worst > allowed_z_score(13)) == biased


def test_standard_errors_cover() -> None:
    """|error| < 3 standard errors of 30 probes in at least 90 % of 200 seeds (99.4 % for Student's t)."""
    matrix = with_spectrum(torch.logspace(0, -2, 40))
    found = [Dense(matrix).estimate_trace("hutchinson", 30, seed) for seed in range(200)]
    inside = [abs(float(one) - float(matrix.trace())) < 3 * float(one.stderr) for one in found]
    assert sum(inside) > 180


def test_hutchpp_is_exact_at_low_rank_and_better_on_decaying_spectra() -> None:
    low = with_spectrum(SPECTRA["low rank"])
    assert float(Dense(low).estimate_trace("hutch++", 12)) == pytest.approx(float(low.trace()), rel=1e-12)
    torch.testing.assert_close(Dense(low).estimate_diagonal("hutch++", 12).value, low.diagonal())
    decaying = Dense(with_spectrum(SPECTRA["decaying"]))
    exact = float(decaying.matrix.trace())
    errors = {
        method: sum(abs(float(decaying.estimate_trace(method, 30, seed)) - exact) for seed in range(20))
        for method in ("hutchinson", "hutch++")
    }
    assert errors["hutch++"] < errors["hutchinson"] / 3


@pytest.mark.parametrize("name", ["decaying", "flat", "ties", "low rank", "one", "two", "zero"])
def test_log_determinants(name: str) -> None:
    """Within five standard errors (of 100 probes, so that these are known), and exact where all eigenvalues are one."""
    matrix, damping = with_spectrum(SPECTRA[name]), 1e-2
    exact = float((SPECTRA[name].double() + damping).log().sum())
    found = Dense(matrix).estimate_log_determinant(damping, probes=100)
    assert abs(float(found) - exact) <= 5 * float(found.stderr) + 1e-6 * (1 + abs(exact))
    if len(matrix) > 2 and name != "zero":
        twin = Dense(1.2 * matrix + 0.01 * torch.eye(len(matrix), dtype=DOUBLE))
        assert abs(float(twin.estimate_log_determinant(damping, probes=100)) - exact) > 5 * float(found.stderr)


def test_less_damping_than_rounding_is_warned_of() -> None:
    """150 eigenvalues of zero are up to 1e-6 in float32."""
    metric = Dense(with_spectrum(torch.tensor([5.0, 1.0, 0.1] + [0.0] * 150)).float())
    with pytest.warns(UserWarning, match="A damping of 1e-08 is less than rounding does to F.*or float64"):
        metric.estimate_log_determinant(1e-8)
    metric.estimate_log_determinant(1e-4)
    Dense(metric.matrix.double()).estimate_log_determinant(1e-8)


def test_autocast_is_for_the_model_alone() -> None:
    metric = Dense(with_spectrum(torch.logspace(0, -3, 60)).float())
    metric._product = lambda block: (metric.matrix.double() @ block.double()).float()  # type: ignore[method-assign]
    v = torch.randn(60, 3, generator=generator())
    for call in (
        lambda: metric.eigenpairs(3, maxiter=10, tol=1e-2).values,
        lambda: metric.estimate_diagonal("hutch++").value,
        lambda: metric.estimate_log_determinant(1e-2).value,
        lambda: metric.solve(v, 1e-1).x,
        lambda: torch.tensor([metric.angle(v[:, 0], v[:, 1]), metric.length(v[:, 0])]),
    ):
        expected = call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = call()
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype


def test_a_matrix_of_one_number() -> None:
    metric = Dense(torch.tensor([[3.0]]))
    assert float(metric.estimate_trace()) == pytest.approx(3)
    assert metric.estimate_diagonal().value.tolist() == pytest.approx([3])


def test_bad_input() -> None:
    metric = Dense(torch.eye(4))
    for call, text in (
        (lambda: metric.eigenpairs(0), "`k` must be between 1 and 4"),
        (lambda: metric.eigenpairs(5), "`k` must be between 1 and 4"),
        (lambda: metric.eigenpairs(1, tol=-1), "`tol` must be a number >= 0"),
        (lambda: metric.eigenpairs(1, maxiter=0), "`maxiter` must be"),
        (lambda: metric.eigenpairs(1, seed=-1), "`seed` must be"),
        (lambda: metric.solve(torch.ones(4), damping=-1.0), "`damping` must be a number >= 0"),
        (lambda: metric.solve(torch.ones(4), damping=math.nan), "`damping` must be a number >= 0"),
        (lambda: metric.solve(torch.ones(3)), r"`rhs` must be a tensor or array of shape \[4\]"),
        (lambda: metric.estimate_log_determinant(0.0), "`damping` must be a number > 0"),
        (lambda: metric.estimate_log_determinant(1.0, probes=1), "`probes` must be between 2"),
        (lambda: metric.estimate_trace("hutch"), "`method` must be 'hutchinson' or 'hutch"),
        (lambda: metric.estimate_trace("hutch++", 3), "`products` must be between 4"),
        (lambda: metric.estimate_diagonal("hutchinson", 1), "`products` must be between 2"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_numbers_of_numpy_are_numbers() -> None:
    metric = Dense(torch.eye(4))
    assert torch.allclose(metric.solve(torch.ones(4), np.float32(1)).x, torch.full((4,), 0.5))


def test_layouts_of_another_order_are_others() -> None:
    a, b = torch.Size([2]), torch.Size([3])
    assert ParameterLayout({"a": a, "b": b}) == ParameterLayout({"a": a, "b": b})
    assert ParameterLayout({"a": a, "b": b}) != ParameterLayout({"b": b, "a": a})
    assert hash(ParameterLayout({"a": a})) == hash(ParameterLayout({"a": a}))


def test_the_base_class_cannot_be_used_alone() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Metric()  # type: ignore[abstract]
    assert issubclass(nm.FisherFactors, Metric)


def test_products_from_the_left() -> None:
    """vᵀ F, for torch's and numpy's vectors and rows; F is its own transpose."""
    matrix = with_spectrum(SPECTRA["decaying"])
    metric, rows = Dense(matrix), torch.randn(3, 60, generator=generator(), dtype=DOUBLE)
    torch.testing.assert_close(rows @ metric, rows @ matrix)
    torch.testing.assert_close(rows[0] @ metric.T, rows[0] @ matrix)
    for v in (rows.numpy(), rows[0].numpy()):
        found = v @ metric
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, v @ matrix.numpy(), rtol=1e-10, atol=1e-10)
