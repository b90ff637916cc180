"""Theorem 1, Lemmas 2 to 4 and the lemma of appendix A, as properties of every distribution."""

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import neuromanifold as nm
from tests.core.problems import PROBLEMS, logits

SLACK = 1e-12  # relative, for inequalities that are equalities at some distributions


def least_eigenvalue(matrix: torch.Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix)[..., 0].min())


def at_most(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a <= b + SLACK * b.abs() + 1e-300).all())


# ------------------------------------------------------------------------------------------------- Theorem 1


@given(logits())
def test_theorem_1(z: torch.Tensor) -> None:
    core = nm.Categorical(z)
    largest, terms = core.largest_eigenvalue(), core.largest_eigenvalue_bound_terms()
    for lower in terms[:3]:
        assert at_most(lower, largest)
    for upper in terms[3:]:
        assert at_most(largest, upper)
    lower, upper = core.largest_eigenvalue_bounds()
    assert lower == max(terms[:3])
    assert upper == min(terms[3:])
    bounds = core.largest_eigenvalue_bounds()
    assert at_most(bounds.gap, terms.gap_bound())
    torch.testing.assert_close(core.spectrum(core.dim).values.sum(), core.trace(), rtol=1e-12, atol=1e-300)


def test_each_term_of_theorem_1_is_the_best_somewhere() -> None:
    generator = torch.Generator().manual_seed(0)
    best_lower, best_upper = set(), set()
    for classes, scale in ((3, 3.0), (5, 3.0), (10, 0.3)):
        z = scale * torch.randn(1000, classes, generator=generator, dtype=torch.float64)
        terms = nm.Categorical(z).largest_eigenvalue_bound_terms()
        best_lower |= set(torch.stack(terms[:3]).argmax(0).tolist())
        best_upper |= set(torch.stack(terms[3:]).argmin(0).tolist())
    assert best_lower == {0, 1, 2}
    assert best_upper == {0, 1}


@given(logits())
def test_the_trace_is_never_the_best_upper_bound(z: torch.Tensor) -> None:
    """p_i(1-p_i) <= Σ_{j≠i} p_j(1-p_j), so 2 max p_i(1-p_i) <= 1 - ‖p‖² always: the third term adds nothing."""
    terms = nm.Categorical(z).largest_eigenvalue_bound_terms()
    assert at_most(terms.gershgorin, terms.trace)


@given(logits())
def test_theorem_1_knows_the_eigenvalue_within_a_factor_of_two(z: torch.Tensor) -> None:
    lower, upper = nm.Categorical(z).largest_eigenvalue_bounds()
    assert at_most(upper, 2 * lower)


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernel(name: str) -> None:
    core = nm.Categorical(PROBLEMS[name])
    assert (core.matvec(core.null_vector()) == 0).all()
    torch.testing.assert_close(core.null_vector().norm(dim=-1), torch.ones(len(PROBLEMS[name])).double())


# --------------------------------------------------------------------------------------------------- Lemma 2


@given(logits(most=8))
def test_lemma_2_envelopes_are_bounds(z: torch.Tensor) -> None:
    core = nm.Categorical(z)
    fisher, scale = core.fisher(), float(core.largest_eigenvalue())
    assert least_eigenvalue(torch.diag_embed(core.upper_envelope()) - fisher) >= -1e-15
    for rank in range(1, core.dim + 1):
        assert least_eigenvalue(fisher - core.lower_envelope(rank).dense()) >= -1e-14 * scale - 1e-300
    torch.testing.assert_close(core.lower_envelope(core.dim).dense(), fisher, rtol=0, atol=1e-14 * scale + 1e-300)


@given(logits(most=8), st.data())
def test_lemma_2_no_smaller_diagonal_is_above(z: torch.Tensor, data: st.DataObject) -> None:
    """The envelope minus anything at one class is not above F: wᵀDw < wᵀFw for a w ⟂ p.  In exact fractions."""
    p = [Fraction(q) for q in nm.Categorical(z).probs.tolist()]
    smaller = [Fraction(q) for q in nm.Categorical(z).upper_envelope().tolist()]
    i, j = data.draw(st.permutations(range(len(p))))[:2]
    assume(p[i] > 0)
    assume(p[j] > 0)
    smaller[i] *= 1 - Fraction(data.draw(st.floats(1e-9, 1)))
    w = [p[j] if c == i else -p[i] if c == j else Fraction(0) for c in range(len(p))]
    mean = sum(q * x for q, x in zip(p, w, strict=True))
    fisher_form = sum(q * x * x for q, x in zip(p, w, strict=True)) - mean * mean
    assert sum(d * x * x for d, x in zip(smaller, w, strict=True)) < fisher_form


@given(logits(most=8), st.floats(1e-6, 1), st.integers(0, 2**31))
def test_lemma_2_no_larger_matrix_of_rank_one_is_below(z: torch.Tensor, size: float, seed: int) -> None:
    """A rank-1 B = u uᵀ other than the envelope is not between it and F: one of the two inequalities fails."""
    core = nm.Categorical(z)
    value, vector = core.lower_envelope(1)
    second = core.spectrum(2).values[1]
    assume(value[0] > 1e-100)
    assume(second < 0.999 * value[0])
    w = torch.randn(core.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u = value.sqrt() * (vector[0] + size * w / w.norm())
    unit_fisher, unit_b = core.fisher() / value, torch.outer(u, u) / value
    above_envelope = least_eigenvalue(unit_b - torch.outer(vector[0], vector[0]))
    below_fisher = least_eigenvalue(unit_fisher - unit_b)
    assert min(above_envelope, below_fisher) < -1e-4 * size**2


# --------------------------------------------------------------------------------------------------- Lemma 3


@given(logits())
def test_lemma_3(z: torch.Tensor) -> None:
    core = nm.Categorical(z)
    values = core.spectrum(core.dim).values
    for rank in range(1, core.dim + 1):
        errors = core.envelope_errors(rank)
        unit = values[rank:].amax() if values[rank:].any() else 1.0  # squares underflow
        torch.testing.assert_close(errors.lower, unit * (values[rank:] / unit).norm(), rtol=1e-10, atol=1e-300)
        assert at_most(errors.lower, errors.trace_bound)
        assert at_most(errors.lower, errors.trimmed_bound)
        assert errors.lower_bound == min(errors.trace_bound, errors.trimmed_bound)
        assert at_most(errors.upper_floor, errors.upper)
    difference = torch.diag_embed(core.probs) - core.fisher()
    torch.testing.assert_close(errors.upper, torch.linalg.matrix_norm(difference), rtol=1e-12, atol=0)


@given(logits())
def test_lemma_3_errors_are_those_of_the_dense_matrices(z: torch.Tensor) -> None:
    core = nm.Categorical(z)
    for rank in range(1, core.dim):
        dense = torch.linalg.matrix_norm(core.fisher() - core.lower_envelope(rank).dense())
        torch.testing.assert_close(core.envelope_errors(rank).lower, dense, rtol=1e-8, atol=1e-14)


def test_lemma_3_as_printed_is_false() -> None:
    """The paper prints 1 - ‖p‖ - p_(C-1), which is negative at p = (½, ½); the proof has ‖p‖²."""
    core = nm.Categorical(torch.zeros(2, dtype=torch.float64))
    errors = core.envelope_errors(1)
    printed = 1 - core.probs.norm() - core.probs[0]
    assert errors.lower == 0
    assert printed < errors.lower
    assert errors.lower <= errors.trace_bound
    # Nor is it only this point: over random p the printed form is below the true error again and again.
    random = nm.Categorical(torch.randn(500, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    p = random.probs
    printed = 1 - p.norm(dim=-1) - p.sort(dim=-1).values[:, -2]
    assert (printed < random.envelope_errors(1).lower).double().mean() > 0.1


# --------------------------------------------------------------------------------------------------- Lemma 4


@given(logits())
def test_lemma_4(z: torch.Tensor) -> None:
    core = nm.Categorical(z)
    labels = torch.arange(core.dim)
    all_labels = nm.Categorical(z.expand(core.dim, -1))
    dense = torch.linalg.matrix_norm(all_labels.empirical_fisher(labels) - core.fisher())
    errors = all_labels.empirical_error(labels)
    torch.testing.assert_close(errors, dense, rtol=1e-7, atol=1e-15)
    worst = core.empirical_error_bound()
    assert at_most(errors, worst.actual + 1e-15)  # no label is worse than the least likely one
    assert core.probs[worst.label] == core.probs.min()
    assert at_most(worst.bound, worst.actual + 1e-15)
    assert at_most(worst.simple_bound, worst.bound + 1e-15)


def test_lemma_4_at_one_hot_is_twice_the_size_of_everything() -> None:
    worst = nm.Categorical(torch.tensor([0.0, 0.0, 100.0], dtype=torch.float64)).empirical_error_bound()
    assert abs(float(worst.actual) - 2) < 1e-12
    assert abs(float(worst.simple_bound) - 2) < 1e-12


# ------------------------------------------------------------------------------------------ lemma of appendix A


def by_enumeration(core: nm.Categorical, matrix: str) -> torch.Tensor:
    """Var(R_ij) as Σ_y p_y (R_ij(y) - F_ij)²."""
    variance = torch.zeros_like(core.fisher())
    for y in range(core.dim):
        labels = torch.full(core.batch_shape, y)
        deviation = getattr(core, matrix)(labels) - core.fisher()
        variance += core.probs[..., y, None, None] * deviation.square()
    return variance


@given(logits())
def test_score_variance(z: torch.Tensor) -> None:
    core = nm.Categorical(z)
    variance, cv, rank_two = core.score_variance()
    torch.testing.assert_close(variance, by_enumeration(core, "empirical_fisher"), rtol=1e-9, atol=1e-16)
    torch.testing.assert_close(
        torch.diag_embed(rank_two), by_enumeration(core, "rank_two_fisher"), rtol=1e-9, atol=1e-16
    )
    assert (variance <= 1 / 16 + 1e-15).all()
    possible = core.fisher().abs() > 1e-150
    expected = variance.sqrt() / core.fisher().abs()
    torch.testing.assert_close(cv[possible], expected[possible], rtol=1e-6, atol=1e-6)


def test_coefficient_of_variation_has_no_bound() -> None:
    rare = torch.tensor([0.0, 10.0, 20.0, 50.0, 100.0], dtype=torch.float64)
    z = torch.stack([torch.zeros_like(rare), torch.zeros_like(rare), -rare], dim=-1)
    cv = nm.Categorical(z).score_variance().cv
    for entry in (cv[:, 2, 2], cv[:, 0, 2]):
        assert (entry[1:] > entry[:-1]).all()
        assert entry[-1] > 1e20
    assert torch.isinf(nm.Categorical(torch.tensor([0.0, 0.0, -torch.inf])).score_variance().cv[2]).all()
    low = nm.Categorical(torch.tensor([0.0, -53.0, -53.0])).score_variance().cv  # float32: p_i p_j underflows
    torch.testing.assert_close(low[1, 2], torch.tensor(4.56e11), rtol=1e-2, atol=0)
