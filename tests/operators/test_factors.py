"""Stacks of gradients: their outer products are F, exactly or on average, and everything else follows from them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.operators.layout import ParameterLayout
from neuromanifold.operators.metric import NotConvergedWarning
from neuromanifold.reference import network as reference
from tests.operators.dense import SOME, dense, relative_error
from tests.problem.test_unchanged import model as nosy
from tests.problem.test_unchanged import same, snapshot
from tests.problems.problem import Net, Problem
from tests.run.test_contract import MODEL, X, Y, batches, network
from tests.zscores import allowed_z_score, worst_z_score

F = reference.reference_matrix(MODEL, lambda m: m(X))
EXACT = nm.fisher_factors(MODEL, batches(16), nm.Exact(), "sample", dtype=torch.float64, reduction="sum")
LOW = nm.fisher_factors(MODEL, batches(4), dtype=torch.float64)


def factors(problem: Problem, *args: Any, **options: Any) -> nm.FisherFactors:
    return nm.fisher_factors(
        problem.model,
        problem.data,
        *args,
        likelihood=problem.likelihood,
        reduction="sum",
        dtype=torch.float64,
        **problem.options,
        **options,
    )


def matrix(found: nm.FisherFactors) -> Tensor:
    return found @ torch.eye(found.shape[0], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("name", SOME)
def test_exact_columns_of_samples_give_the_definition(name: str) -> None:
    found = factors(SOME[name], nm.Exact(), "sample")
    assert relative_error(matrix(found), dense(SOME[name])) < 1e-12
    assert found.count == 4


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("name", ["MLP", "tied embeddings", "segmentation, class_dim=1"])
@pytest.mark.parametrize("per", ["batch", "sample"])
def test_probes_are_unbiased_for_the_whole_matrix(name: str, per: Any) -> None:
    """40 seeds of 16 probes, all entries at a false-alarm rate of 1e-6; a twin that is half too large must fail.

    Means of 16 products of sums of signs have somewhat longer tails than normal numbers: a fifth is added to the limit.
    """
    estimator, expected = nm.Hutchinson(16, deflate=0, orthogonal=False), dense(SOME[name])
    samples = torch.stack([matrix(factors(SOME[name], estimator, per, seed=seed)) for seed in range(40)])
    entries = expected.abs() > 1e-6 * expected.abs().max()
    limit = 1.2 * allowed_z_score(int(entries.sum()))
    assert worst_z_score(samples[:, entries], expected[entries]) < limit
    assert worst_z_score(1.5 * samples[:, entries], expected[entries]) > limit


def test_rows_are_those_of_batches_or_samples() -> None:
    estimator = nm.Hutchinson(2, deflate=0, orthogonal=False)
    assert nm.fisher_factors(MODEL, batches(16), estimator).rank == 2 * 4
    assert nm.fisher_factors(MODEL, batches(16), estimator, "sample").rank == 2 * 64
    empirical = nm.fisher_factors(MODEL, batches(16), nm.Empirical(), "sample", dtype=torch.float64, reduction="sum")
    rows, logits = reference.jacobian(MODEL, lambda m: m(X))
    torch.testing.assert_close(empirical.rows, torch.einsum("ncp,nc->np", rows, nm.Categorical(logits).score(Y)))
    one, other = (
        nm.fisher_factors(MODEL, batches(1), nm.Hutchinson(deflate=0), per).rows for per in ("batch", "sample")
    )
    torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_the_diagonal_is_that_of_fisher_diagonal() -> None:
    for per in ("batch", "sample"):
        found = nm.fisher_factors(MODEL, batches(16), nm.Hutchinson(deflate=0), per, seed=3, dtype=torch.float64)
        expected = nm.fisher_diagonal(MODEL, batches(16), nm.Hutchinson(deflate=0), granularity=per, seed=3)
        for name, value in found.diagonal().items():
            torch.testing.assert_close(value, expected[name])
        assert found.trace.value == pytest.approx(float(expected.trace))


def test_fixed_columns_of_whole_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="not a Fisher information"):
        nm.fisher_factors(MODEL, batches(16), nm.Exact())
    with pytest.raises(ValueError, match="`granularity` must be 'batch' or 'sample'"):
        nm.fisher_factors(MODEL, batches(16), granularity="token")
    with pytest.raises(ValueError, match="`dtype` must be"):
        nm.fisher_factors(MODEL, batches(16), dtype=torch.int8)


@pytest.mark.parametrize("found", [EXACT, LOW], ids=["more rows than parameters", "fewer"])
@pytest.mark.parametrize("view", ["mean", "sum"])
def test_everything_agrees_with_the_dense_matrix(found: nm.FisherFactors, view: str) -> None:
    found = getattr(found, view)
    expected = matrix(found)
    i, j = torch.tensor([[0, 5], [66, 40]]), torch.tensor([[3, 5], [1, 41]])
    torch.testing.assert_close(found.entries(i, j), expected[i, j])
    torch.testing.assert_close(found.block("0.bias"), expected[32:40, 32:40])
    torch.testing.assert_close(found.block("0.bias", "2.bias"), expected[32:40, 64:])
    torch.testing.assert_close(matrix(found.filter("2.*")), expected[40:, 40:])
    assert found.trace.value == pytest.approx(float(expected.trace()))
    assert found.frobenius_norm == pytest.approx(float(expected.norm()))
    assert found.effective_rank == pytest.approx(float(expected.trace() ** 2 / expected.norm() ** 2))
    torch.testing.assert_close(found.eigenpairs(4).values, torch.linalg.eigvalsh(expected).flip(0)[:4])
    assert float(found.eigenpairs(4).residuals.max()) < 1e-7 * float(expected.trace())
    v = torch.randn(67, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for damping in (1e-4, 1.0):
        damped = expected + damping * torch.eye(67, dtype=torch.float64)
        assert found.log_determinant(damping) == pytest.approx(float(torch.logdet(damped)))
        solution = found.solve(v, damping, tol=1e-10)
        torch.testing.assert_close(solution.x, torch.linalg.solve(damped, v), rtol=1e-6, atol=1e-8)
        assert solution.residual < 1e-8
    step = found.layout.split(v[:, 0])
    assert found.length(step) == pytest.approx(float(v[:, 0] @ expected @ v[:, 0]) ** 0.5)


@pytest.mark.parametrize("damping", [1e-2, 1e-4, 1e-6, 1e-8])
def test_little_damping_is_no_problem_in_float32(damping: float) -> None:
    """With Woodbury's identity in float32, x was 50,000 times off at 1e-8; and the rows are not independent."""
    rows = torch.randn(10, 300, generator=torch.Generator().manual_seed(0))
    found = nm.FisherFactors(torch.cat([rows, rows]), ParameterLayout({"a": torch.Size([300])}), 20, LOW.provenance)
    rhs = torch.randn(300, generator=torch.Generator().manual_seed(1))
    dense_sum = torch.cat([rows, rows]).double().mT @ torch.cat([rows, rows]).double()
    exact = torch.linalg.solve(dense_sum / 20 + damping * torch.eye(300, dtype=torch.float64), rhs.double())
    solution = found.solve(rhs, damping)
    assert relative_error(solution.x, exact) < 1e-6
    assert solution.residual < 1e-5


def test_too_little_damping_is_warned_of() -> None:
    rows = torch.ones(3, 20)
    found = nm.FisherFactors(rows, ParameterLayout({"a": torch.Size([20])}), 3, LOW.provenance)
    with pytest.warns(NotConvergedWarning, match="in closed form. Use more damping"):
        found.solve(torch.randn(20, generator=torch.Generator().manual_seed(0)), 1e-20)


def test_more_eigenpairs_than_rows() -> None:
    found = LOW.eigenpairs(20)
    assert LOW.rank == 16
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(matrix(LOW)).flip(0)[:20], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_kept_in_a_chosen_type_and_works_in_float32(dtype: torch.dtype) -> None:
    small = nm.fisher_factors(network().float(), [X.float()[:, :]] * 4, dtype=dtype)
    large = nm.fisher_factors(network().float(), [X.float()[:, :]] * 4, dtype=torch.float32)
    assert small.rows.dtype == dtype
    found = small @ torch.ones(67)
    assert found.dtype == torch.float32
    error = float((found - large @ torch.ones(67)).norm() / (large @ torch.ones(67)).norm())
    assert error < 10 * torch.finfo(dtype).eps
    assert small.to(torch.float64).precision == torch.float64
    solution = small.solve(torch.ones(67), damping=1e-2)
    assert solution.residual < 1e-5


def test_autocast_is_for_the_model_alone() -> None:
    found = LOW.to(torch.float32)
    expected = (found @ torch.ones(67), found.block("0.bias"), found.estimate_diagonal().value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = (found @ torch.ones(67), found.block("0.bias"), found.estimate_diagonal().value)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("scale", [1e-8, 1e6])
def test_gradients_that_float16_has_no_numbers_for_are_refused(scale: float) -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.zero_()
    options: dict[str, Any] = {"parameters": "weight"}
    with pytest.raises(ValueError, match=r"`dtype` must be one that can hold.*Use torch.bfloat16"):
        nm.fisher_factors(model, [scale * X.float()], dtype=torch.float16, **options)
    kept = nm.fisher_factors(model, [scale * X.float()], dtype=torch.bfloat16, **options)
    assert kept.trace.value == pytest.approx(
        nm.fisher_factors(model, [scale * X.float()], **options).trace.value, rel=0.01
    )


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_nor_are_they_lost_by_what_is_done_with_them(scale: float) -> None:
    """Where float16 and float32 are added, where factors are scaled, and where they are converted."""
    model, x = nn.Linear(4, 3, bias=False), X.float()
    nn.init.zeros_(model.weight)
    small, far = nm.fisher_factors(model, [x], dtype=torch.float16), nm.fisher_factors(model, [scale * x], seed=1)
    for lose in (lambda: small * scale**2, lambda: far.to(torch.float16)):
        with pytest.raises(ValueError, match=r"`dtype` must be one that can hold.*float16, which loses"):
            lose()
    for total in (small + far, far + small):
        assert total.rows.dtype == torch.float32
        assert total.sum.trace.value == pytest.approx(small.sum.trace.value + far.sum.trace.value)
    assert (4 * small).sum.trace.value == pytest.approx(4 * small.sum.trace.value)


def test_half_precision_models() -> None:
    model = network().to(torch.float16)
    found = nm.fisher_factors(model, [X.half()], nm.Exact(), "sample", reduction="sum")
    assert relative_error(found @ torch.eye(67, dtype=torch.float64), F) < 0.02


def test_memory_is_forecast_and_bounded() -> None:
    with pytest.raises(ValueError, match=r"`max_bytes` must be enough.*16 batches like the first.*granularity='batch'"):
        nm.fisher_factors(MODEL, batches(4), max_bytes=15 * 67 * 4)
    assert nm.fisher_factors(MODEL, batches(4), max_bytes=16 * 67 * 4).rank == 16
    seen = []

    def endless() -> Any:
        while True:
            seen.append(1)
            yield X

    with pytest.raises(ValueError, match=r"so far \(4 gradients of 268 bytes\)"):
        nm.fisher_factors(MODEL, endless(), max_bytes=1000)
    assert len(seen) == 4


def test_they_add_save_and_load(tmp_path: Path) -> None:
    parts = [nm.fisher_factors(MODEL, [data], seed=i, dtype=torch.float64) for i, data in enumerate(batches(32))]
    whole = parts[0] + parts[1]
    assert (whole.count, whole.rank) == (64, 2)
    torch.testing.assert_close(matrix(whole.sum), matrix(parts[0].sum) + matrix(parts[1].sum))
    whole.save(tmp_path / "f.safetensors")
    again = nm.load(tmp_path / "f.safetensors")
    assert isinstance(again, nm.FisherFactors)
    assert torch.equal(again.rows, whole.rows)
    assert (again.layout, again.count, again.reduction) == (whole.layout, 64, "mean")
    assert again.provenance.estimator == whole.provenance.estimator
    assert repr(again) == repr(whole)
    assert "2 gradients of 67 parameters" in repr(whole)
    (tmp_path / "f.safetensors").write_bytes((tmp_path / "f.safetensors").read_bytes()[:100])
    with pytest.raises(nm.FileError, match="damaged"):
        nm.load(tmp_path / "f.safetensors")
    with pytest.raises(ValueError, match="factors of the same parameters"):
        whole + nm.fisher_factors(MODEL, [X], parameters="2.*")


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_parameters_without_a_use(per: Any) -> None:
    model = Net(lambda m, x: m.used(x), used=nn.Linear(4, 3), unused=nn.Linear(4, 3)).double()
    found = nm.fisher_factors(model, batches(16), granularity=per, parameters="unused.*")
    assert found.trace.value == found.frobenius_norm == found.effective_rank == found.length(torch.ones(15)) == 0
    assert found.log_determinant(1.0) == 0
    assert torch.equal(found.solve(torch.ones(15), 0.5).x, torch.full((15,), 2.0))
    assert found.eigenpairs(2).values.tolist() == [0, 0]
    assert not found.diagonal()["unused.weight"].any()


def test_bad_input() -> None:
    other_order = ParameterLayout(dict(reversed(LOW.layout.shapes.items())))
    with pytest.raises(ValueError, match="factors of the same parameters"):
        LOW + nm.FisherFactors(LOW.rows, other_order, 64, LOW.provenance)
    with pytest.raises(KeyError, match=r"No parameter '3.weight' in this result: did you mean '2.weight'"):
        LOW.block("3.weight")
    with pytest.raises(ValueError, match="`patterns` must be"):
        LOW.filter("nothing.*")
    with pytest.raises(ValueError, match="`j` must be of i's shape"):
        LOW.entries(torch.tensor([1]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="`i` must be between 0 and 66"):
        LOW.entries(torch.tensor([67]), torch.tensor([1]))
    with pytest.raises(ValueError, match="`damping` must be a number > 0"):
        LOW.log_determinant(0.0)
    assert math.isfinite(LOW.log_determinant(1e-3))


def test_parameters_without_a_rule_come_one_by_one() -> None:
    model = Net(
        lambda m, x: m.head(x @ m.odd.square()), odd=nn.Parameter(torch.ones(4, 4)), head=nn.Linear(4, 3)
    ).double()
    with pytest.warns(nm.SlowPathWarning, match="odd"):
        found = nm.fisher_factors(model, batches(16), nm.Exact(), "sample", dtype=torch.float64, reduction="sum")
    assert relative_error(matrix(found), reference.reference_matrix(model, lambda m: m(X))) < 1e-12


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("per", ["batch", "sample"])
def test_nothing_changes(per: Any) -> None:
    m = nosy()
    before = snapshot(m)
    nm.fisher_factors(m, [torch.ones(4, 4)] * 2, granularity=per)
    assert same(before, snapshot(m))
