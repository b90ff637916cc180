"""The secular solver against exact arithmetic, against eigh, and at the edges."""

import pytest
import torch
from hypothesis import given

import neuromanifold as nm
from neuromanifold.core import spectrum as solver
from neuromanifold.reference.core import spectrum_by_eigh
from tests.core import exact
from tests.core.problems import PROBLEMS, logits

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny


def orthonormality_error(vectors: torch.Tensor) -> float:
    gram = vectors.double() @ vectors.double().mT
    return float((gram - torch.eye(gram.shape[-1], dtype=torch.float64)).abs().amax()) if gram.numel() else 0.0


def check_against_exact_arithmetic(z: torch.Tensor) -> None:
    classes = z.shape[-1]
    values, vectors = nm.Categorical(z).spectrum(classes)
    assert torch.isfinite(vectors).all()
    assert (values[..., :-1] >= values[..., 1:]).all()
    assert orthonormality_error(vectors) < 1e-13
    p = exact.probabilities(z)
    floor = 20 * EPS * values[0].item() + classes * TINY  # no float64 vector does better: test_no_vector_is_better
    for j, reference in enumerate(exact.eigenvalues(p, classes - 1)):
        value = values[j].item()
        assert abs(value - reference) <= 1e-12 * reference + classes * TINY
        assert exact.residual(p, value, vectors[j]) <= 1e-10 * value + floor
    assert values[-1] == 0


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_exact_arithmetic_on_problems(name: str) -> None:
    for z in PROBLEMS[name]:
        check_against_exact_arithmetic(z)


@given(logits(most=7))
def test_equals_exact_arithmetic_on_drawn_logits(z: torch.Tensor) -> None:
    check_against_exact_arithmetic(z)


@pytest.mark.parametrize("name", PROBLEMS)
def test_largest_eigenvector_has_residual_relative_to_its_eigenvalue(name: str) -> None:
    for z in PROBLEMS[name]:
        values, vectors = nm.Categorical(z).spectrum(1)
        value = values[0].item()
        assert exact.residual(exact.probabilities(z), value, vectors[0]) <= 1e-10 * value + len(z) * TINY


def test_no_vector_is_better() -> None:
    """The residual of a small eigenvalue's vector is limited by its rounding, not by its computation."""
    z = torch.tensor([0.3, 0.7, 1e-14], dtype=torch.float64).log()
    p = exact.probabilities(z)
    value = exact.eigenvalues(p, 2)[1]
    best = [q / (q - value) for q in p]
    length = exact.mpmath.sqrt(sum(x * x for x in best))
    rounded = torch.tensor([float(x / length) for x in best], dtype=torch.float64)
    ours = nm.Categorical(z).spectrum(2)
    assert exact.residual(p, float(value), rounded) > 1e-10 * value
    assert (rounded - ours.vectors[1]).abs().max() <= 2 * EPS


@pytest.mark.parametrize("classes", [2, 3, 14, 100, 300])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 5.0])
def test_equals_eigh_where_eigh_is_accurate(classes: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    core = nm.Categorical(scale * torch.randn(4, classes, generator=generator, dtype=torch.float64))
    ours, theirs = core.spectrum(classes), spectrum_by_eigh(core.fisher(), classes)
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(ours.dense(), core.fisher(), rtol=0, atol=1e-13)
    assert orthonormality_error(ours.vectors) < 1e-12


def test_two_classes_in_closed_form() -> None:
    z = torch.tensor([[0.0, 0.0], [0.0, 3.0], [500.0, 0.0]], dtype=torch.float64)
    core = nm.Categorical(z)
    values, vectors = core.spectrum(1)
    torch.testing.assert_close(values[:, 0], 2 * core.probs.prod(-1), rtol=1e-15, atol=0)
    torch.testing.assert_close(vectors.abs(), torch.full_like(vectors, 0.5**0.5), rtol=1e-15, atol=0)


def test_two_classes_are_no_exception() -> None:
    """The closed form is the root of the same equation: it scales with p, and leaves out subnormal numbers."""
    p = torch.tensor([[0.3, 0.9], [5.0, 5.0], [1.0, 1e-310]], dtype=torch.float64)
    padded = torch.cat([p, torch.zeros(3, 1, dtype=torch.float64)], dim=-1)  # three classes: the general solver
    torch.testing.assert_close(solver.eigenvalues(p, 1), solver.eigenvalues(padded, 1), rtol=1e-15, atol=0)


@pytest.mark.parametrize("kind", ["normal", "peaked", "uniform", "zipf", "rounded"])
def test_150000_classes(kind: str) -> None:
    classes, k = 150_000, 3
    z = torch.randn(2, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = {
        "normal": 3 * z,
        "peaked": torch.cat([torch.full((2, 1), 25.0, dtype=torch.float64), z[:, 1:]], dim=-1),
        "uniform": torch.zeros_like(z),
        "zipf": -torch.arange(1, classes + 1, dtype=torch.float64).log().repeat(2, 1),
        "rounded": z.round(),
    }[kind]
    core = nm.Categorical(z)
    values, vectors = core.spectrum(k)
    residual = core.matvec(vectors.movedim(-2, 0)).movedim(0, -2) - values[..., None] * vectors
    assert (residual.norm(dim=-1) <= 1e-10 * values).all()
    assert orthonormality_error(vectors) < 1e-11
    assert vectors.sum(-1).abs().max() < 1e-10
    # Interlacing proves that these are the largest ones, and not others.
    top = core.probs.topk(k + 1, dim=-1).values
    assert ((top[:, 1:] <= values) & (values <= top[:, :-1])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PROBLEMS)
def test_low_precision_is_good_to_its_own(dtype: torch.dtype, name: str) -> None:
    low = PROBLEMS[name].clamp(min=-3e4).to(dtype)  # the double spectrum of the very same rounded logits
    values, vectors = nm.Categorical(low).spectrum(low.shape[-1])
    reference = nm.Categorical(low.double()).spectrum(low.shape[-1])
    assert values.dtype == vectors.dtype == torch.float32
    assert torch.isfinite(values).all()
    assert torch.isfinite(vectors).all()
    assert orthonormality_error(vectors) < 5e-6
    # exp(z - max) has the relative error eps·|z - max|, so wide logits cost digits in any implementation.
    spread = float((low.double().amax(-1) - low.double().amin(-1)).amax())
    rtol = torch.finfo(torch.float32).eps * (8 + spread)
    torch.testing.assert_close(values.double(), reference.values, rtol=rtol, atol=1e-37)


def test_blocks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples in several blocks, and one sample in several blocks of eigenvalues."""
    z = 3 * torch.randn(7, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    core = nm.Categorical(z)
    whole, errors = core.spectrum(19), core.envelope_errors(12)
    for elements in (1, 60, 700):
        monkeypatch.setitem(solver._BLOCK_ELEMENTS, "cpu", elements)
        for cut, full in zip(core.spectrum(19), whole, strict=True):
            torch.testing.assert_close(cut, full, rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(core.envelope_errors(12).lower, errors.lower, rtol=1e-13, atol=0)


def test_any_leading_shape() -> None:
    z = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, vectors = nm.Categorical(z).spectrum(2)
    assert values.shape == (2, 3, 4, 2)
    assert vectors.shape == (2, 3, 4, 2, 6)
    one = nm.Categorical(z[1, 2, 3]).spectrum(2)
    torch.testing.assert_close(one.values, values[1, 2, 3], rtol=1e-14, atol=0)
    torch.testing.assert_close(one.vectors, vectors[1, 2, 3], rtol=1e-13, atol=1e-15)
    empty = nm.Categorical(z[:0]).spectrum(2)
    assert empty.values.shape == (0, 3, 4, 2)
    assert empty.vectors.shape == (0, 3, 4, 2, 6)


def test_steps_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand random problems of all kinds are solved within ten steps."""
    monkeypatch.setattr(solver, "_MAX_STEPS", 10)
    generator = torch.Generator().manual_seed(0)
    for kind in range(10):
        classes = 10 * (kind + 1)
        z = torch.randn(1000, classes, generator=generator, dtype=torch.float64)
        z = z * 10 ** (6 * torch.rand(1000, 1, generator=generator, dtype=torch.float64) - 3)
        z[::3, 0] += 40
        core = nm.Categorical(z)
        values, vectors = core.spectrum(3)
        residual = core.matvec(vectors.movedim(-2, 0)).movedim(0, -2) - values[..., None] * vectors
        assert (residual.norm(dim=-1) <= 1e-14 * values[:, :1] * classes**0.5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_fixed_number_of_steps_gives_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The path of a GPU, which is not waited for, walked on a CPU."""
    for problem in PROBLEMS.values():
        core = nm.Categorical(problem.to(dtype))
        expected = core.spectrum(core.dim)
        with monkeypatch.context() as patch:
            patch.setattr(solver, "_may_wait", lambda _: False)
            found = core.spectrum(core.dim)
        torch.testing.assert_close(found.values, expected.values, rtol=50 * torch.finfo(dtype).eps, atol=1e-300)
        torch.testing.assert_close(found.dense(), expected.dense(), rtol=0, atol=50 * torch.finfo(dtype).eps)
