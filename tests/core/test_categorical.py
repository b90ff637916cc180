"""Metric, factor, sampling and scores of the simplex."""

import math

import pytest
import torch
from mpmath import mpf

import neuromanifold as nm
from neuromanifold.reference.core import fisher_by_definition
from tests.core import exact
from tests.core.problems import PROBLEMS
from tests.zscores import allowed_z_score, worst_z_score


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def core() -> nm.Categorical:
    return nm.Categorical(0.7 * torch.randn(4, 3, 6, generator=generator(), dtype=torch.float64))


@pytest.mark.parametrize("name", PROBLEMS)
def test_fisher_is_the_expected_outer_product_of_scores(name: str) -> None:
    z = PROBLEMS[name]
    if torch.isinf(z).any():
        z = z.clamp(min=-1e4)  # the reference differentiates log p, which is -inf for impossible classes
    torch.testing.assert_close(nm.Categorical(z).fisher(), fisher_by_definition(z), rtol=1e-10, atol=1e-15)


def test_products_equal_those_of_the_dense_matrices(core: nm.Categorical) -> None:
    v = torch.randn(5, 4, 3, 6, generator=generator(1), dtype=torch.float64)
    fisher, factor = core.fisher(), core.factor_matrix()
    torch.testing.assert_close(factor @ factor.mT, fisher)
    torch.testing.assert_close(core.matvec(v), torch.einsum("...ij,...j->...i", fisher, v))
    torch.testing.assert_close(core.factor(v), torch.einsum("...ij,...j->...i", factor, v))
    torch.testing.assert_close(core.factor_transpose(v), torch.einsum("...ji,...j->...i", factor, v))


@pytest.mark.parametrize("name", PROBLEMS)
def test_columns_are_a_factor_of_least_rank(name: str) -> None:
    core = nm.Categorical(PROBLEMS[name])
    columns = torch.stack([core.column(i) for i in range(core.rank)], dim=-1)
    assert columns.shape[-1] == core.dim - 1
    torch.testing.assert_close(columns @ columns.mT, core.fisher(), rtol=1e-12, atol=1e-15)


def column_by_formula(core: nm.Categorical, i: int) -> torch.Tensor:
    """√p_j (e_j - p) - √p_j √p_m/(1 + √p_m) (e_m - p), with j the class number i when m is left out."""
    m = core.probs.argmax(-1)
    j = torch.where(m <= i, i + 1, i)
    root_j, root_m = (core.probs.gather(-1, y[..., None]).sqrt() for y in (j, m))
    return root_j * (core.score(j) - root_m / (1 + root_m) * core.score(m))


LOGITS = {
    "normal": lambda z: z,
    "saturated": lambda z: torch.cat([z[..., :1] + 69.0, z[..., 1:]], dim=-1),  # p = 1 - 1e-30
    "saturated, last": lambda z: torch.cat([z[..., :-1], z[..., -1:] + 69.0], dim=-1),
    "ties": lambda z: z.round(),
    "uniform": torch.zeros_like,
    "impossible": lambda z: torch.cat([z[..., :-1], torch.full_like(z[..., -1:], -math.inf)], dim=-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3)])
def test_columns_at_once_are_those_one_by_one(
    shape: tuple[int, ...], classes: int, kind: str, dtype: torch.dtype
) -> None:
    z = torch.randn(*shape, classes, generator=generator(classes), dtype=torch.float64).to(dtype)
    core, eps = nm.Categorical(LOGITS[kind](z)), torch.finfo(dtype).eps
    single = [core.column(i) for i in range(core.rank)]
    for start in range(core.rank):
        for stop in range(start + 1, core.rank + 1):
            block = core.columns(start, stop)
            assert block.shape == (stop - start, *shape, classes)
            assert block.dtype == dtype
            assert block.is_contiguous()  # each column is a view that can be reshaped
            assert torch.equal(block, torch.stack(single[start:stop]))
    expected = torch.stack([column_by_formula(core, i) for i in range(core.rank)])
    columns = core.columns(0, core.rank)
    torch.testing.assert_close(columns, expected, rtol=20 * eps, atol=0)
    fisher = torch.einsum("k...c,k...d->...cd", columns, columns)
    torch.testing.assert_close(fisher, core.fisher(), rtol=40 * eps, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("saturation", [1e-3, 40.0, 300.0, 700.0])
@pytest.mark.parametrize("likely", [0, 2, 3])
def test_columns_are_accurate_relatively_for_saturated_predictions(likely: int, saturation: float) -> None:
    z = torch.tensor([0.0, 0.3, -0.2, 0.1], dtype=torch.float64)
    z[likely] += 1 + saturation
    p, columns = exact.probabilities(z), nm.Categorical(z).columns(0, 3)
    rest = sum(q for c, q in enumerate(p) if c != likely)
    share = exact.mpmath.sqrt(p[likely]) / (1 + exact.mpmath.sqrt(p[likely]))
    for column, j in zip(columns, [c for c in range(4) if c != likely], strict=True):
        for c in range(4):
            own = sum(q for d, q in enumerate(p) if d != j) if c == j else -p[c]
            value = exact.mpmath.sqrt(p[j]) * (own - share * (rest if c == likely else -p[c]))
            assert abs(mpf(float(column[c])) - value) <= 1e-12 * abs(value) + 1e-307  # else not a normal number


def test_columns_never_wait_for_a_device() -> None:
    """A tensor without data has nothing to be read; labels are checked, so that a score would have to wait."""
    core = nm.Categorical(torch.zeros(3, 5, device="meta"))
    assert core.columns(1, 4).shape == (3, 3, 5)
    assert core.column(2).shape == (3, 5)
    with pytest.raises(RuntimeError, match="meta"):
        core.score(torch.zeros(3, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
def test_columns_have_derivatives(core: nm.Categorical) -> None:
    def columns(z: torch.Tensor) -> torch.Tensor:
        return nm.Categorical(z).columns(1, 4)

    z = core.logits[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(columns, z, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(columns, z)


def test_columns_that_do_not_exist_are_refused(core: nm.Categorical) -> None:
    for start, stop, argument in ((-1, 2, "start"), (5, 6, "start"), (2, 2, "stop"), (3, 2, "stop"), (0, 6, "stop")):
        with pytest.raises(ValueError, match=f"`{argument}` must be between .*the rank is 5"):
            core.columns(start, stop)
    for i in (-1, 5):
        with pytest.raises(ValueError, match="`i` must be between 0 and 4"):
            core.column(i)


def test_vectors_broadcast_against_the_batch_both_ways(core: nm.Categorical) -> None:
    v = torch.randn(6, generator=generator(1), dtype=torch.float64)
    for product in ("matvec", "factor", "factor_transpose"):
        one = getattr(core, product)(v)
        assert one.shape == (4, 3, 6)
        torch.testing.assert_close(one, getattr(core, product)(v.expand(4, 3, 6)))
        single = nm.Categorical(core.logits[0, 0])
        torch.testing.assert_close(getattr(single, product)(v.expand(7, 6))[3], one[0, 0])


@pytest.mark.parametrize("saturation", [1e-3, 40.0, 300.0, 700.0])
def test_products_are_accurate_relatively_for_saturated_predictions(saturation: float) -> None:
    """1 - p of a certain class is as small as 1e-304; no result may have lost its digits to it."""
    z = torch.tensor([saturation, 0.3, -0.2, 0.1], dtype=torch.float64)
    core, p = nm.Categorical(z), exact.probabilities(z)
    v = torch.tensor([1.0, -0.7, 0.4, 2.0], dtype=torch.float64)
    exact_v, root = [mpf(x) for x in v.tolist()], [exact.mpmath.sqrt(q) for q in p]

    def close(ours: torch.Tensor, theirs: list[mpf]) -> bool:
        return all(abs(mpf(a) - b) <= 1e-12 * abs(b) for a, b in zip(ours.tolist(), theirs, strict=True))

    others = [sum(q for j, q in enumerate(p) if j != i) for i in range(4)]
    assert close(core.complement, others)
    product = [p[i] * sum(p[j] * (exact_v[i] - exact_v[j]) for j in range(4)) for i in range(4)]
    assert close(core.matvec(v), product)
    assert close(core.factor_transpose(v), [y / r for y, r in zip(product, root, strict=True)])
    factor = [
        root[i] * exact_v[i] * others[i] - p[i] * sum(root[j] * exact_v[j] for j in range(4) if j != i)
        for i in range(4)
    ]
    assert close(core.factor(v), factor)
    assert close(core.score(torch.tensor(0)), [others[0], *(-q for q in p[1:])])
    assert close(core.trace()[None], [sum(q * o for q, o in zip(p, others, strict=True))])


def test_sqrt_form_is_the_same_cotangent(core: nm.Categorical) -> None:
    """Appendix B: the gradient of 2 Σ √p ξ in the logits is S ξ, not merely similar to it."""
    xi = torch.randn(core.logits.shape, generator=generator(1), dtype=torch.float64)
    z = core.logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((2 * (0.5 * z.log_softmax(-1)).exp() * xi).sum(), z)
    torch.testing.assert_close(gradient, core.factor(xi))


def test_score_is_the_gradient_of_the_log_probability(core: nm.Categorical) -> None:
    z = core.logits.clone().requires_grad_()
    y = core.sample(generator())
    (gradient,) = torch.autograd.grad(z.log_softmax(-1).gather(-1, y[..., None]).sum(), z)
    torch.testing.assert_close(core.score(y), gradient)
    torch.testing.assert_close(core.empirical_fisher(y), gradient[..., :, None] * gradient[..., None, :])


# Random things.  False-alarm rate of each test below: 1e-6, by a union bound over its entries.


def test_samples_have_the_right_frequencies(core: nm.Categorical) -> None:
    y = core.sample(generator(), (20_000,))
    assert y.shape == (20_000, 4, 3)
    hits = torch.nn.functional.one_hot(y, 6).double()
    assert worst_z_score(hits, core.probs) < allowed_z_score(core.probs.numel())
    biased = nm.Categorical(1.1 * core.logits)  # the twin: logits off by ten per cent
    twin = torch.nn.functional.one_hot(biased.sample(generator(), (20_000,)), 6).double()
    assert worst_z_score(twin, core.probs) > allowed_z_score(core.probs.numel())


@pytest.mark.parametrize("matrix", ["empirical_fisher", "rank_two_fisher"])
def test_sampled_labels_give_unbiased_matrices(core: nm.Categorical, matrix: str) -> None:
    y = core.sample(generator(), (20_000,))
    limit = allowed_z_score(core.fisher().numel())
    assert worst_z_score(getattr(core, matrix)(y), core.fisher()) < limit
    fixed = core.probs.argmax(-1).expand_as(y)  # the twin: always the most likely label
    mixed = torch.where(torch.rand(y.shape, generator=generator(1)) < 0.1, fixed, y)
    assert worst_z_score(getattr(core, matrix)(mixed), core.fisher()) > limit


def test_factor_of_white_noise_is_unbiased(core: nm.Categorical) -> None:
    xi = torch.randn(20_000, 4, 3, 6, generator=generator(), dtype=torch.float64).sign()
    u = core.factor(xi)
    limit = allowed_z_score(core.fisher().numel())
    assert worst_z_score(u[..., :, None] * u[..., None, :], core.fisher()) < limit
    twin = u + 0.5 * core.probs  # not centred
    assert worst_z_score(twin[..., :, None] * twin[..., None, :], core.fisher()) > limit


def test_sampling_uses_the_given_generator_alone(core: nm.Categorical) -> None:
    state = torch.random.get_rng_state()
    first, second = core.sample(generator(3), (5,)), core.sample(generator(3), (5,))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.random.get_rng_state())


def test_labels_may_have_extra_leading_dimensions(core: nm.Categorical) -> None:
    y = core.sample(generator(), (2, 5))
    for method in ("score", "empirical_fisher", "rank_two_fisher", "empirical_error"):
        result = getattr(core, method)(y)
        assert result.shape[:4] == (2, 5, 4, 3)
        torch.testing.assert_close(result[1, 3], getattr(core, method)(y[1, 3]))
    single = nm.Categorical(core.logits[0, 0])
    assert single.empirical_error(y[:, :, 0, 0]).shape == (2, 5)


def test_impossible_classes_are_never_drawn() -> None:
    core = nm.Categorical(torch.tensor([0.0, -torch.inf, 1.0]))
    assert not (core.sample(generator(), (2000,)) == 1).any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
def test_an_empty_batch_is_fine(shape: tuple[int, ...]) -> None:
    core = nm.Categorical(torch.zeros(shape))
    assert core.fisher().shape == (*shape, 5)
    assert core.matvec(torch.zeros(shape)).shape == shape
    assert core.factor(torch.zeros(shape)).shape == shape
    assert core.sample(generator(), (2,)).shape == (2, *shape[:-1])
    assert core.score(core.sample(generator())).shape == shape
    assert core.spectrum(5).vectors.shape == (*shape, 5)
    assert core.envelope_errors(2).lower.shape == shape[:-1]
    assert core.empirical_error_bound().actual.shape == shape[:-1]
    assert core.largest_eigenvalue_bounds().lower.shape == shape[:-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    core = nm.Categorical(torch.randn(3, 5, generator=generator()).to(dtype))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert core.fisher().dtype == core.matvec(core.probs).dtype == core.spectrum(2).vectors.dtype == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):  # autocast must not reach into the geometry
        assert torch.equal(nm.Categorical(core.logits).spectrum(2).vectors, core.spectrum(2).vectors)
        assert torch.equal(core.lower_envelope(2).dense(), core.spectrum(2).dense())
        assert core.spectrum(2).dense().dtype == expected


def test_float32_is_accurate_for_many_classes() -> None:
    """A plain softmax in float32 loses 1e-4 of the mass here, and float32 sampling never draws one of the many."""
    z = torch.zeros(150_000)
    z[0] = math.log(150_000 * 0.996 / 0.004)
    core, reference = nm.Categorical(z), nm.Categorical(z.double())
    for method in ("trace", "largest_eigenvalue"):
        torch.testing.assert_close(getattr(core, method)().double(), getattr(reference, method)(), rtol=1e-6, atol=0)
    torch.testing.assert_close(core.probs.double(), reference.probs, rtol=1e-6, atol=0)
    hits = (core.sample(generator(), (1000,)) != 0).double()
    assert worst_z_score(hits, 1 - reference.probs[0]) < allowed_z_score(1)


def test_repr(core: nm.Categorical) -> None:
    assert repr(core) == "Categorical(batch_shape=[4, 3], dim=6, dtype=float64, device=cpu)"
