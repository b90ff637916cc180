"""Section 3 for single distributions: every inequality on random Jacobians, at the edges too; where the paper slips."""

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.bounds.network import Terms, empirical_spectral_error, network_terms, pair_products
from neuromanifold.reference import bounds as reference

KINDS = ("random", "peaked", "uniform", "one-hot", "tied", "impossible classes")


def logits_of(kind: str, samples: int, classes: int, generator: torch.Generator) -> Tensor:
    z = torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    if kind == "peaked":
        return 8 * z
    if kind == "uniform":
        return torch.zeros_like(z)
    if kind == "one-hot":
        return 1000 * z
    if kind == "tied":
        return z.round()
    if kind == "impossible classes":
        z[:, : classes // 2] = -torch.inf
    return z


def problem(kind: str, classes: int, size: int, rank: int | None = None) -> tuple[Tensor, nm.Categorical, Tensor]:
    """∂z/∂θ [6, C, P], of a rank if one is given, the core, and labels."""
    generator = torch.Generator().manual_seed(classes * size)
    J = torch.randn(6, classes, size, generator=generator, dtype=torch.float64)
    if rank is not None:
        J = J[:, :, :rank] @ torch.randn(6, rank, size, generator=generator, dtype=torch.float64)
    z = logits_of(kind, 6, classes, generator)
    return J, nm.Categorical(z), torch.randint(0, classes, (6,), generator=generator)


def terms_of(J: Tensor, core: nm.Categorical, labels: Tensor | None) -> Terms:
    return network_terms(J @ J.mT, core, labels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("classes", "size", "rank"), [(2, 5, None), (3, 7, None), (5, 3, None), (6, 9, 2), (45, 50, None)]
)
def test_every_inequality_holds_for_every_x_and_rank(kind: str, classes: int, size: int, rank: int | None) -> None:
    """A smaller number of parameters than classes, and a Jacobian of low rank, make σ_1 = 0; the statements hold."""
    J, core, labels = problem(kind, classes, size, rank)
    t = terms_of(J, core, labels)
    tiny = 1e-9 * t.upper_bound.max()
    chain = [
        (t.smallest, t.paired),
        (t.smallest, t.smallest_centred),
        (t.paired, t.paired_centred),
        (t.paired_centred, t.trace),
        (t.trace, t.upper_trace),
        (t.upper_error, t.upper_bound),
        (t.lower_trace, t.trace[:, None]),
        (t.lower_error, t.lower_centred),
        (t.lower_centred, t.lower_bound),
        (t.lower_bound, t.lower_relaxed),
        (t.empirical_error, t.empirical_centred),
        (t.empirical_centred, t.empirical_bound),
        (t.worst_bound, t.worst_centred),
        (t.worst_centred, t.worst_error),
        (t.empirical_error, t.worst_error),
    ]
    for i, (small, large) in enumerate(chain):
        assert bool((small <= large + tiny).all()), i
    torch.testing.assert_close(t.lower_trace[:, -1], t.trace)
    assert bool((t.lower_error[:, -1] == 0).all())


@pytest.mark.parametrize("kind", KINDS[:5])
@pytest.mark.parametrize(("classes", "size"), [(2, 5), (4, 6), (5, 3)])
def test_sums_over_samples_are_those_of_dense_matrices(kind: str, classes: int, size: int) -> None:
    J, core, labels = problem(kind, classes, size)
    gram = J.flatten(0, 1) @ J.flatten(0, 1).T
    upper, lower = pair_products(gram, core)
    error = empirical_spectral_error(gram, core, labels, torch.Generator().manual_seed(0))
    for rank in range(1, classes):
        expected = reference.statements(J, core.logits, labels, rank)
        scale = 1e-9 * expected["Prop. 7"].upper
        assert float(torch.linalg.matrix_norm(upper)) == pytest.approx(expected["Prop. 7"].actual, rel=1e-8, abs=scale)
        values, vectors = core.spectrum(rank)  # where eigenvalues are tied, F^LR is a choice
        top = vectors.mT @ (values[..., None] * vectors)
        tail = float(torch.linalg.matrix_norm(torch.einsum("ncp,ncd,ndq->pq", J, core.fisher() - top, J)))
        assert float(lower[rank - 1].sum().sqrt()) == pytest.approx(tail, rel=1e-7, abs=scale)
        assert error == pytest.approx(expected["Prop. 9"].actual, rel=1e-8, abs=scale)
    torch.testing.assert_close(upper.diagonal(), terms_of(J, core, None).upper_error)
    torch.testing.assert_close(lower.diagonal(dim1=1, dim2=2).sqrt().T, terms_of(J, core, None).lower_error)


@pytest.mark.parametrize(
    ("classes", "size", "rank", "kind"),
    [
        *((*sizes, kind) for sizes in ((2, 5, None), (5, 3, None), (6, 9, 2)) for kind in KINDS),
        *((60, 30, None, kind) for kind in ("random", "impossible classes")),
    ],
)
def test_the_worst_label_is_the_worst_of_all(classes: int, size: int, rank: int | None, kind: str) -> None:
    J, core, labels = problem(kind, classes, size, rank)
    each = [terms_of(J, core, torch.full_like(labels, y)).empirical_error for y in range(classes)]
    found = terms_of(J, core, labels).worst_error
    torch.testing.assert_close(found, torch.stack(each).amax(0), rtol=1e-9, atol=1e-12)


def test_the_worst_label_need_not_be_unlikely_nor_have_the_longest_gradient() -> None:
    generator = torch.Generator().manual_seed(4)
    J, scale, z = (torch.randn(6, 45, n, generator=generator, dtype=torch.float64) for n in (60, 1, 1))
    J, core = J * scale.exp(), nm.Categorical(3 * z[..., 0])
    each = [terms_of(J, core, torch.full((6,), y)).empirical_error for y in range(45)]
    torch.testing.assert_close(terms_of(J, core, None).worst_error, torch.stack(each).amax(0))
    unlikely = terms_of(J, core, core.probs.argmin(-1)).empirical_error
    centred = J - torch.einsum("nc,ncp->np", core.probs, J)[:, None]  # Jᵀ(e_y - p) for every y
    longest = terms_of(J, core, centred.square().sum(-1).argmax(-1)).empirical_error
    assert bool((torch.maximum(unlikely, longest) < 0.9 * torch.stack(each).amax(0)).any())


def test_the_step_of_proposition_10_holds_for_every_label() -> None:
    """‖M - R(y)‖_σ >= |‖e_y - p‖² - λ_C|, also where the difference is negative."""
    negative = 0
    for seed in range(50):
        z = 4 * torch.randn(1, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        core = nm.Categorical(z)
        for y in range(4):
            label = torch.tensor([y])
            norm = torch.linalg.matrix_norm(core.fisher() - core.empirical_fisher(label), 2)
            difference = core.score(label).square().sum() - core.spectrum(1)[0][0, 0]
            negative += int(difference < -1e-3)
            assert float(norm) >= abs(float(difference)) - 1e-12
    assert negative > 0


def test_without_labels_only_proposition_9_is_missing() -> None:
    J, core, labels = problem("random", 4, 6)
    with_labels, without = terms_of(J, core, labels), terms_of(J, core, None)
    for name, value in without._asdict().items():
        if name.startswith("empirical"):
            assert bool(value.isnan().all())
        else:
            torch.testing.assert_close(value, getattr(with_labels, name))


def test_two_classes_leave_nothing_between_the_centred_bounds() -> None:
    J, core, labels = problem("random", 2, 5)
    t = terms_of(J, core, labels)
    for value in (t.smallest_centred, t.paired_centred, t.lower_trace[:, 0]):
        torch.testing.assert_close(value, t.trace)
    torch.testing.assert_close(t.lower_error, torch.zeros_like(t.lower_error))


def test_proposition_8_is_not_tighter_than_proposition_7_for_even_predictions() -> None:
    """The remark after Prop. 8 says so "in general"; at p = e/C both bounds and errors are the other way round."""
    J, core, labels = problem("uniform", 10, 40)
    t = terms_of(J, core, labels)
    assert bool((t.lower_bound[:, 0] > 1.5 * t.upper_bound).all())
    assert bool((t.lower_error[:, 0] > t.upper_error).all())
    peaked = terms_of(
        J, nm.Categorical(8 * torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).double()), None
    )
    assert float(peaked.lower_relaxed[:, 0].sum()) < float(peaked.upper_bound.sum())


def test_a_shift_of_all_logits_changes_the_papers_bounds_but_neither_f_nor_the_centred_ones() -> None:
    """z + c(θ)e has the same F; with log-probabilities as outputs the upper bound is F itself, and σ_1 is 0."""
    J, core, labels = problem("random", 4, 9)
    shifted = J - torch.einsum("nc,ncp->np", core.probs, J)[:, None]  # of log p
    a, b = terms_of(J, core, labels), terms_of(shifted, core, labels)
    same = ("trace", "smallest_centred", "paired_centred", "lower_error", "lower_centred", "empirical_error")
    for name in (*same, "empirical_centred", "worst_error", "worst_centred", "lower_trace"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name))
    torch.testing.assert_close(b.upper_trace, b.trace)
    assert bool((b.smallest < 1e-9 * a.smallest).all())
    assert bool((a.upper_error > 0.01).all())


@pytest.mark.parametrize("kind", KINDS[:5])
@pytest.mark.parametrize(("classes", "size"), [(2, 5), (4, 30), (5, 3)])
def test_ranks_are_at_most_those_of_the_remark_after_proposition_5(kind: str, classes: int, size: int) -> None:
    """rank F^LR(k) <= k N for every k, F^LR(C-1) = F, and F^DG - F has rank N at most."""
    J, core, _ = problem(kind, classes, size)
    for rank in range(1, classes):
        lower, exact, upper = reference.dense_matrices(J, core.logits, rank)
        assert int(torch.linalg.matrix_rank(lower, hermitian=True)) <= min(size, rank * len(J))
        assert int(torch.linalg.matrix_rank(upper - exact, hermitian=True, atol=1e-9)) <= min(size, len(J))
    torch.testing.assert_close(lower, exact)
