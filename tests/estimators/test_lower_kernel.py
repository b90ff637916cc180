"""Probes of the lower envelope from one kernel, against `core.spectrum` in float64: interpreted, or on a GPU.

In the interpreter by default; with TRITON_INTERPRET=0 on a GPU.  The signs of a call follow from its seed, so that from
some probes U = Ξ S of a distribution S = (√λ_j v_j)_j is found by least squares, and with it E[u uᵀ] = SᵀS exactly.
"""

import itertools
import math
import os

import mpmath
import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import triton
import triton.language as tl

import neuromanifold as nm
from neuromanifold.kernels.triton import lower as module
from neuromanifold.kernels.triton.probing import random_words, sign
from neuromanifold.problem.validation import LateValidation
from tests.core import exact
from tests.core.problems import PROBLEMS
from tests.zscores import allowed_z_score, worst_z_score

DEVICE = "cuda" if torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1" else "cpu"
GENERATOR = torch.Generator()
INF, NAN = math.inf, math.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter, about -inf + inf
TOLERANCE = 1e-6  # ten roundings of u, in float32

ODD = {  # logits of one distribution each
    "two": [0.3, -0.5],
    "saturated, two": [69.0, 0.0],  # p = 1 - 1e-30
    "saturated": [1.0, 70.5, -28.0, 0.5, 1.5],
    "beyond float32": [0.0, 200.0, 1.0, -40.0],
    "tie at the top": [2.0, -1.0, 2.0, 0.0],
    "tie of three": [3.0, 3.0, 0.0, 3.0],
    "two ties": [1.0, 3.0, 1.0, 3.0, 1.0, 0.0],
    "tie below": [3.0, 1.0, 1.0, 0.0],
    "tie far below": [80.0, 1.0, 1.0, 1.0, 0.0],
    "near tie": [1.0, 1.0 + 1.2e-7, 0.0, 1.0 - 6e-8],
    "nearest tie": [1e-45, 0.0, 1e-30, -1.0, 1.0],
    "impossible": [1.0, -INF, 0.0, -INF, -1.0],
    "a mask's number": [1.0, torch.finfo(torch.float32).min, 0.5],
    "one possible": [-INF, 2.0, -INF],
    "two possible": [-INF, 2.0, -INF, 1.0],
    "large logits": [1e4, 1e4 - 1.0, 1e4 - 1.5],
    "huge logits": [3e38, -3e38, 3e38],
}
ALL = {(name, k): torch.tensor(z) for name, z in ODD.items() for k in (1, 2, 3)}
ALL |= {(name, 2): z[-1].float() for name, z in PROBLEMS.items() if "C3" in name}
ALL |= {(name, 3): z[-1].float() for name, z in PROBLEMS.items() if "C12" in name}


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def run(logits: Tensor, rank: int, seed: int = 0, counts: Tensor | None = None, scale: float = 1.0) -> Tensor:
    counts = counts if counts is None else counts.to(DEVICE)
    u, finite = module.lower_probe(logits.to(DEVICE), rank, scale, generator(seed), counts)
    assert finite.all()
    return u.cpu()


@triton.jit  # type: ignore[untyped-decorator]
def _signs(seed, out, RANK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, ROWS)
    words = random_words(tl.load(seed), row, 0, 0)
    for j in range(RANK):
        tl.store(out + row * RANK + j, sign(words, j))


def signs(rows: int, rank: int, seed: int) -> Tensor:
    """Ξ [rows, k] of a call."""
    out = torch.empty(triton.next_power_of_2(rows), rank, device=DEVICE)
    word = torch.empty(1, dtype=torch.int64, device=DEVICE).random_(generator=generator(seed))
    _signs[(1,)](word, out, RANK=rank, ROWS=len(out))
    return out[:rows].cpu().double()


def columns(logits: Tensor, rank: int) -> Tensor:
    """√λ_j v_j of logits [C] as [k, C], read off k + 1 probes."""
    k = min(rank, len(logits) - 1)
    seed = next(seed for seed in itertools.count() if torch.linalg.matrix_rank(signs(k + 1, k, seed)) == k)
    u, xi = run(logits.expand(k + 1, -1), rank, seed).double(), signs(k + 1, k, seed)
    S: Tensor = torch.linalg.pinv(xi) @ u
    assert ((xi @ S - u).abs() <= TOLERANCE * u.abs().amax(0) + 1e-37).all()  # and nothing else is in u
    return S


def envelope(logits: Tensor, k: int) -> Tensor:
    """Σ_j λ_j v_j v_jᵀ of logits [C] in float64, or with 150 digits where float64 cannot tell a few p apart."""
    gaps = logits.double().unique().diff()
    if len(gaps) == 0 or gaps.min() > 1e-6 or len(logits) > 12:
        return nm.Categorical(logits.double()).lower_envelope(k).dense()
    with mpmath.workdps(150):
        p = mpmath.matrix(exact.probabilities(logits))
        values, vectors = mpmath.eigsy(mpmath.diag(list(p)) - p * p.T)  # ascending
        leading = vectors[:, len(p) - k :] * mpmath.diag([mpmath.sqrt(value) for value in values[len(p) - k :]])
        return torch.tensor((leading * leading.T).tolist(), dtype=torch.float64)


def assert_envelope(S: Tensor, logits: Tensor) -> None:
    """SᵀS is the envelope, S [k, C]: in every entry, relatively to the diagonal entries of its row and column."""
    found, k = S.mT @ S, len(S)
    top = logits.sort(descending=True).values
    if k < len(logits) - 1 and top[k - 1] == top[k + 1] > -INF:  # a tie is cut: any choice in its space will do
        larger, p = int((top > top[k]).sum()), nm.Categorical(logits.double()).probs
        tau, tied = p[logits == top[k]].amax(), logits == top[k]
        inside = found - (envelope(logits, larger) if larger else 0.0)
        error = 10 * TOLERANCE * found.diagonal().amax()
        assert (inside[~tied].abs() <= error).all()
        assert (inside.sum(-1).abs() <= error).all()
        assert ((inside @ inside - tau * inside).abs() <= error * tau).all()  # τ times a projection
        assert (inside.trace() - (k - larger) * tau).abs() <= error
        return
    expected = envelope(logits, k)
    size = expected.diagonal().sqrt() + 1e-32
    assert ((found - expected).abs() <= TOLERANCE * size[:, None] * size).all()


@pytest.mark.parametrize(("name", "rank"), ALL)
def test_envelopes_are_those_of_the_spectrum(name: str, rank: int) -> None:
    assert_envelope(columns(ALL[name, rank], rank), ALL[name, rank])


@pytest.mark.parametrize(("classes", "rank"), [(14, 1), (33, 8), (100, 2), (1000, 2), (4096, 2)])
def test_rows_of_any_length(classes: int, rank: int) -> None:
    scale = 0.1 if classes == 100 else 3.0
    logits = scale * torch.randn(classes, generator=torch.Generator().manual_seed(classes))
    assert_envelope(columns(logits, rank), logits)


@pytest.mark.parametrize("classes", [2, 3, 9])
def test_the_whole_metric_from_its_rank_on(classes: int) -> None:
    logits = torch.randn(classes, generator=torch.Generator().manual_seed(classes)) * 3
    S, metric = columns(logits, 8), nm.Categorical(logits.double()).fisher()
    size = metric.diagonal().sqrt()
    assert len(S) == classes - 1
    assert ((S.mT @ S - metric).abs() <= TOLERANCE * size[:, None] * size).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """Computed like float32, and rounded at the end (which is towards zero in the interpreter)."""
    logits = (4 * torch.randn(3, 12, generator=torch.Generator().manual_seed(0))).to(dtype)
    u, full = run(logits, 2), run(logits.float(), 2)
    assert u.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    torch.testing.assert_close(u.float(), full, rtol=0.0 if dtype == torch.float16 else 2**-7, atol=0)


def test_signs_are_independent_even_odds() -> None:
    """False alarms: one in a million.  One sign in ten that is +1, that of another, or that of a neighbour is seen."""

    def z_score(xi: Tensor) -> float:
        pairs = [xi[1:, i] * xi[1:, j] for i in range(8) for j in range(i)]
        neighbours = [xi[1:, i] * xi[:-1, j] for i in range(8) for j in range(8)]
        samples = torch.stack([*xi[1:].unbind(1), *pairs, *neighbours], 1)
        return worst_z_score(samples, torch.zeros(samples.shape[1], dtype=samples.dtype))

    allowed, drawn = allowed_z_score(8 + 28 + 64), signs(4096, 8, seed=11)
    assert z_score(drawn) < allowed
    forced, paired, repeated = drawn.clone(), drawn.clone(), drawn.clone()
    forced[::10, 5] = 1.0
    paired[::10, 1] = drawn[::10, 0]
    repeated[1::10, 3] = drawn[:-1:10, 3]
    assert min(z_score(forced), z_score(paired), z_score(repeated)) > allowed


def test_rows_seeds_and_probes_differ_and_repeat() -> None:
    """For a uniform distribution signs can be read off: Helmert's vectors, in the order of the classes."""
    logits = torch.zeros(6, 5)
    helmert = torch.tensor([[1, -1, 0, 0, 0], [1, 1, -2, 0, 0], [1, 1, 1, -3, 0], [1, 1, 1, 1, -4]]).double()
    first, again, other = run(logits, 4, seed=1), run(logits, 4, seed=1), run(logits, 4, seed=2)
    xi = first.double() @ helmert.mT / (helmert.square().sum(1) / 5).sqrt()
    torch.testing.assert_close(xi, signs(6, 4, seed=1))
    assert len(xi.unique(dim=0)) > 3
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    source = generator(1)
    one, two = (module.lower_probe(logits.to(DEVICE), 4, 1.0, source).cotangent.cpu() for _ in range(2))
    assert torch.equal(one, first)
    assert not torch.equal(two, first)


def test_rows_that_do_not_count_are_zero_and_not_looked_at() -> None:
    logits = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(12) % 3 > 0
    logits[~counts] = NAN
    u = run(logits, 2, counts=counts)
    assert (u[~counts] == 0).all()
    assert torch.equal(u[counts], run(logits.nan_to_num(), 2)[counts])
    assert (run(logits[:3], 2, counts=torch.zeros(3, dtype=torch.bool)) == 0).all()


def test_bad_rows_are_reported_and_do_not_spoil_others() -> None:
    logits = torch.zeros(9, 5)
    logits[1, 0], logits[3, 4], logits[4], logits[6, 2], logits[8] = NAN, INF, -INF, -INF, NAN
    u, finite = module.lower_probe(logits.to(DEVICE), 2, 1.0, generator(0))
    assert finite.tolist() == [True, False, True, False, False, True, True, True, False]
    assert u[finite].isfinite().all()


def test_any_shape_and_stride() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    u = run(logits, 2, scale=0.5)
    assert u.shape == logits.shape
    wide = torch.randn(6, 9)
    wide[:, :7] = logits.view(6, 7)
    assert torch.equal(run(wide[:, :7], 2, scale=0.5).view(2, 3, 7), u)  # rows with a stride
    assert torch.equal(run(logits.movedim(-1, 1).contiguous().movedim(1, -1), 2, scale=0.5), u)
    torch.testing.assert_close(run(logits, 2), 2 * u)
    assert run(torch.zeros(0, 7), 2).shape == (0, 7)
    assert run(torch.zeros(1, 7), 2).shape == (1, 7)
    assert run(torch.zeros(7), 2).shape == (7,)


# ---------------------------------------------------------------------------------------------------- integration


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, walked on a CPU."""
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "interpret")
    monkeypatch.setattr(LateValidation, "unchecked", lambda _, z, __: nm.Categorical(z, validate=False))


def lower(rank: int, probes: int = 1) -> nm.Hutchinson:
    return nm.Hutchinson(probes, envelope=nm.Lower(rank), orthogonal=False)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_only_what_the_kernel_does_is_given_to_it() -> None:
    core = nm.Categorical(torch.zeros(3, 20))
    for estimator in (lower(1), lower(8), lower(2, probes=3), nm.Hutchinson(envelope=nm.Lower(2))):
        assert estimator.fused(core, GENERATOR) is not None
        assert estimator.fused(nm.Bernoulli(torch.zeros(3, 20)), GENERATOR) is None
        assert estimator.fused(nm.Categorical(torch.zeros(3, 20, dtype=torch.float64)), GENERATOR) is None
        assert estimator.fused(nm.Categorical(torch.zeros(3, 20, requires_grad=True)), GENERATOR) is None
        assert estimator.fused(nm.Categorical(torch.zeros(3, 4097)), GENERATOR) is None
    assert lower(100).fused(nm.Categorical(torch.zeros(3, 9)), GENERATOR) is not None  # its rank is 8
    gaussian = nm.Hutchinson(noise="gaussian", envelope=nm.Lower(2))
    for other in (lower(9), nm.Hutchinson(2, envelope=nm.Lower(3)), gaussian, nm.Exact(nm.Lower(2))):
        assert other.fused(core, GENERATOR) is None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_cotangents_come_from_the_kernel() -> None:
    core = nm.Categorical(torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16))
    first, second = lower(2, probes=2).cotangents(core, None, torch.Generator().manual_seed(5))
    assert torch.equal(first, run(core.given, 2, seed=5, scale=0.5**0.5))
    assert not torch.equal(second, first)
    assert "probs" not in vars(core)
    assert "logits" not in vars(core)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("granularity", ["sample", "batch"])
def test_a_run_is_right(granularity: str) -> None:
    """One eigenpair of one sample in each batch: only a sign is random, so that there is no noise."""
    torch.manual_seed(0)
    model, data = torch.nn.Linear(4, 5), list(torch.randn(3, 1, 4))
    expected = nm.fisher_diagonal(model, data, nm.Exact(nm.Lower(1)))
    found = nm.fisher_diagonal(model, data, lower(1), granularity=granularity)
    for name in ("weight", "bias"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_run_names_the_batch_with_nan() -> None:
    data = [torch.ones(2, 3), torch.full((2, 3), NAN)]
    with pytest.raises(ValueError, match=r"Batch 1 of `data`: `logits`.*NaN or infinity at index \[0\]"):
        nm.fisher_diagonal(torch.nn.Linear(3, 4), data, lower(2))
