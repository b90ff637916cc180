"""The fused probe against the same formula in float64: in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

import itertools
import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import neuromanifold as nm
from neuromanifold.kernels.triton import probe as module
from neuromanifold.problem.cotangents import LateValidation
from tests.zscores import allowed_z_score, worst_z_score

DEVICE = "cuda" if torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1" else "cpu"
GENERATOR = torch.Generator()
INF, NAN = math.inf, math.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter, about -inf + inf

PROBLEMS = {  # logits of one distribution each
    "peaked": [4.0, 1.0, 0.5, -1.0, -2.0],
    "saturated": [-29.0, 1.0, -28.0, -30.0],
    "one-hot": [0.0, 60.0, 1.0],
    "beyond float32": [0.0, 200.0, 1.0],
    "uniform": [1.0] * 5,
    "tie at the top": [2.0, -1.0, 2.0, 0.0],
    "tie of three": [3.0, 3.0, 0.0, 3.0],
    "near tie": [1.0, 1.0 + 1e-6, 0.0],
    "tie below": [3.0, 1.0, 1.0, 0.0],
    "impossible": [1.0, -INF, 0.0, -INF, -1.0],
    "a mask's number": [1.0, torch.finfo(torch.float32).min, 0.5],
    "one possible": [-INF, 2.0, -INF],
    "large logits": [1e4, 1e4 - 1.0, 1e4 - 1.5],
}


@pytest.fixture(autouse=True)
def scalars_in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy 2.4 does not let Triton 3.6's interpreter use a scalar as the end of a range (triton#9171)."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, *scope: object) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def run(
    logits: Tensor, deflate: bool = True, seed: int = 0, counts: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    counts = counts if counts is None else counts.to(DEVICE)
    u, finite = module.hutchinson_probe(logits.to(DEVICE), deflate, scale, generator(seed), counts)
    assert finite.all()
    return u.cpu()


def singular_vector(logits: Tensor) -> Tensor:
    """w = Sᵀv/√λ in float64, or zero if the metric is."""
    core = nm.Categorical(logits.double())
    values, vectors = core.spectrum(1)
    return core.factor_transpose(vectors[..., 0, :]) / values.sqrt().clamp(min=1e-300)


def candidates(logits: Tensor, deflate: bool) -> Tensor:
    """S η for all signs, [2^(C+1), C], in float64, for logits [C]."""
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=len(logits) + 1)), dtype=torch.float64)
    xi, w = signs[:, 1:], singular_vector(logits)
    eta = xi + (signs[:, :1] - xi @ w[:, None]) * w if deflate and w.any() else xi
    return nm.Categorical(logits.double()).factor(eta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_plain_probes_are_the_factor_times_signs(name: str, dtype: torch.dtype) -> None:
    logits = torch.tensor(PROBLEMS[name]).to(dtype)
    u = run(logits.expand(4, -1), deflate=False)
    assert u.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    spread = float((logits.amax() - logits[logits > -1e30]).amax())  # exp(z - max) has the relative error eps·|z - max|
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6 * (1 + spread)
    expected = candidates(logits, deflate=False)
    size = nm.Categorical(logits.double()).probs.sqrt() * len(logits) + 1e-18
    error = ((u.double()[:, None] - expected).abs() / size).amax(-1).amin(-1)  # relatively, in each entry
    assert (error < 2 * rounding).all()


@pytest.mark.parametrize("name", [name for name in PROBLEMS if "tie" not in name and name != "uniform"])
def test_deflated_probes_are_the_factor_times_deflated_signs(name: str) -> None:
    logits = torch.tensor(PROBLEMS[name])
    u, core = run(logits.expand(8, -1)), nm.Categorical(logits.double())
    size = core.probs.sqrt() * len(logits) + 1e-18
    error = ((u.double()[:, None] - candidates(logits, deflate=True)).abs() / size).amax(-1).amin(-1)
    assert (error < 2e-4).all()  # the accuracy of w; and without deflation it is something else
    if core.rank > 1 and name not in ("one possible", "one-hot", "beyond float32"):
        assert (((u.double()[:, None] - candidates(logits, deflate=False)).abs() / size).amax(-1).amin(-1) > 1e-2).any()


@pytest.mark.parametrize("gap", [0.0, 1e-6, 0.1, 1.0, 8.0, 27.6, 60.0])  # e^-27.6 = 1e-12
def test_two_classes_have_no_noise_at_all(gap: float) -> None:
    logits = torch.tensor([[0.0, gap], [gap, 0.0]])
    u, metric = run(logits).double(), nm.Categorical(logits.double()).fisher()
    torch.testing.assert_close(u[:, :, None] * u[:, None, :], metric, rtol=1e-5, atol=0)


@pytest.mark.parametrize("block", [64, 512])
@pytest.mark.parametrize("deflate", [False, True])
def test_long_rows_go_block_by_block(monkeypatch: pytest.MonkeyPatch, block: int, deflate: bool) -> None:
    """Where all p are small, the signs can be read off u, but for those that deflation may turn: the largest of w."""
    monkeypatch.setattr(module, "LARGEST_BLOCK", block)
    classes = 5000 if block == 512 else 300
    logits = torch.randn(2, classes, generator=torch.Generator().manual_seed(0))
    u, core = run(logits, deflate, seed=3).double(), nm.Categorical(logits.double())
    w = singular_vector(logits) if deflate else torch.zeros_like(u)
    for row in range(2):
        found, unsure = [], logits[row].topk(6 if deflate else 1).indices
        for xi_1, *others in itertools.product([-1.0, 1.0], repeat=1 + len(unsure)):
            xi = u[row].sign()
            xi[unsure] = torch.tensor(others, dtype=torch.float64)
            eta = xi + (xi_1 - xi @ w[row]) * w[row] if deflate else xi
            found.append(float((core.factor(eta)[row] - u[row]).norm() / u[row].norm()))
        assert min(found) < (1e-3 if deflate else 1e-6)


def test_signs_of_very_long_rows_are_even_odds() -> None:
    """More blocks than a word has bits; neighbours, and lanes of neighbouring blocks and words, are independent."""
    u = run(torch.zeros(1, 33 * 4096 + 5), deflate=False)[0]
    signs = torch.where(u > 0, 1.0, -1.0).double()
    for products in (signs, *(signs[lag:] * signs[:-lag] for lag in (1, 32, 4096, 32 * 4096))):
        assert abs(float(products.sum())) < allowed_z_score(5) * math.sqrt(len(products))


@pytest.mark.parametrize(
    ("name", "deflate"),
    [("peaked", False), ("peaked", True), ("uniform", True), ("tie of three", True), ("impossible", True)],
)
def test_probes_are_unbiased(name: str, deflate: bool) -> None:
    """False alarms: one in a million, and a twin that is 10 % too long is found out."""
    logits = torch.tensor(PROBLEMS[name])
    u = run(logits.expand(640, -1), deflate, seed=7).double()
    metric, squares = nm.Categorical(logits.double()).fisher(), u[:, :, None] * u[:, None, :]

    def z_score(samples: Tensor) -> float:
        mean = samples.mean(0)  # what is not random is there up to rounding
        return worst_z_score(samples, torch.where((mean - metric).abs() < 1e-7, mean, metric))

    assert z_score(squares) < allowed_z_score(metric.numel())
    assert worst_z_score(u, torch.zeros_like(u[0])) < allowed_z_score(u.shape[1])
    assert z_score(squares * 1.21) > allowed_z_score(metric.numel())


def test_deflation_has_the_variance_that_it_has_in_torch() -> None:
    logits = torch.tensor(PROBLEMS["peaked"]).expand(512, -1)
    metric = nm.Categorical(logits[0].double()).fisher()

    def error(u: Tensor) -> float:
        return float((u.double()[:, :, None] * u.double()[:, None, :] - metric).square().sum((1, 2)).mean())

    torch_path = next(nm.Hutchinson().cotangents(nm.Categorical(logits), None, torch.Generator()))
    assert error(run(logits)) < 1.3 * error(torch_path) < error(run(logits, deflate=False))


def test_rows_seeds_and_probes_differ_and_repeat() -> None:
    logits = torch.zeros(19, 40)
    first, again, other = run(logits, seed=1), run(logits, seed=1), run(logits, seed=2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(torch.cat([first, other]).sign().unique(dim=0)) == 38
    source = generator(1)
    one, two = (module.hutchinson_probe(logits.to(DEVICE), True, 1.0, source).cotangent.cpu() for _ in range(2))
    assert torch.equal(one, first)
    assert not torch.equal(two, first)


@pytest.mark.parametrize("deflate", [False, True])
def test_rows_that_do_not_count_are_zero_and_not_looked_at(deflate: bool) -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(40) % 3 > 0
    logits[~counts] = NAN
    u = run(logits, deflate, counts=counts)
    assert (u[~counts] == 0).all()
    assert torch.equal(u[counts], run(logits.nan_to_num(), deflate)[counts])
    assert (run(logits, deflate, counts=torch.zeros(40, dtype=torch.bool)) == 0).all()


def test_bad_rows_are_reported_and_do_not_spoil_others() -> None:
    logits = torch.zeros(9, 5)
    logits[1, 0], logits[3, 4], logits[4], logits[6, 2], logits[8] = NAN, INF, -INF, -INF, NAN
    for deflate in (False, True):
        u, finite = module.hutchinson_probe(logits.to(DEVICE), deflate, 1.0, generator(0))
        assert finite.tolist() == [True, False, True, False, False, True, True, True, False]
        assert u[finite].isfinite().all()


@pytest.mark.parametrize("position", [0, 70, 299])
def test_nan_in_any_block_is_reported(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    monkeypatch.setattr(module, "LARGEST_BLOCK", 64)
    for bad in (NAN, INF):
        logits = torch.zeros(1, 300)
        logits[0, position] = bad
        assert not module.hutchinson_probe(logits.to(DEVICE), True, 1.0, generator(0)).finite.any()


def test_any_shape_and_stride() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    u = run(logits, scale=0.5)
    assert u.shape == logits.shape
    wide = torch.randn(6, 9)
    wide[:, :7] = logits.view(6, 7)
    assert torch.equal(run(wide[:, :7], scale=0.5).view(2, 3, 7), u)  # rows with a stride
    assert torch.equal(run(logits.movedim(-1, 1).contiguous().movedim(1, -1), scale=0.5), u)
    torch.testing.assert_close(run(logits), 2 * u)
    assert run(torch.zeros(0, 7)).shape == (0, 7)
    assert run(torch.zeros(1, 7)).shape == (1, 7)
    assert run(torch.zeros(7)).shape == (7,)


# ---------------------------------------------------------------------------------------------------- integration


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, walked on a CPU; where kernels are compiled, runs on the GPU itself walk it."""
    if DEVICE == "cuda":
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "interpret")
    monkeypatch.setattr(LateValidation, "unchecked", lambda _, z, __: nm.Categorical(z, validate=False))


class Twice(nm.Hutchinson):
    """Somebody's own."""

    def cotangents(self, core: nm.Core, labels: Tensor | None, generator: torch.Generator) -> Iterator[Tensor]:
        return (2 * u for u in super().cotangents(core, labels, generator))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_only_what_the_kernel_does_is_given_to_it() -> None:
    core = nm.Categorical(torch.zeros(3, 4))
    for estimator in (nm.Hutchinson(deflate=0), nm.Hutchinson(), nm.Hutchinson(3, deflate=0, orthogonal=False)):
        assert estimator.fused(core, GENERATOR) is not None
        assert estimator.fused(nm.Bernoulli(torch.zeros(3, 4)), GENERATOR) is None
        assert estimator.fused(nm.Categorical(torch.zeros(3, 4, dtype=torch.float64)), GENERATOR) is None
        assert estimator.fused(nm.Categorical(torch.zeros(3, 4, requires_grad=True)), GENERATOR) is None
    for estimator in (
        nm.Hutchinson(2, deflate=0),
        nm.Hutchinson(deflate=2),
        nm.Hutchinson(deflate=0, noise="gaussian"),
        nm.Hutchinson(envelope=nm.Upper()),
        Twice(),
        nm.MonteCarlo(),
        nm.Exact(),
    ):
        assert estimator.fused(core, GENERATOR) is None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_cotangents_come_from_the_kernel() -> None:
    core = nm.Categorical(torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16))
    first, second = nm.Hutchinson(2, orthogonal=False).cotangents(core, None, torch.Generator().manual_seed(5))
    expected = run(core.given, seed=5, scale=0.5**0.5)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, expected)
    assert not torch.equal(second, first)
    assert "probs" not in vars(core)
    assert "logits" not in vars(core)


class Tokens(torch.nn.Module):
    """Two classes for each of several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        z: Tensor = self.head(self.embedding(input_ids))
        return torch.where(attention_mask[..., None] > 0, z, torch.nan)  # what is padded does not matter


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_run_skips_positions_and_is_right() -> None:
    """One position that counts in each sample, and two classes: the estimate has no noise."""
    torch.manual_seed(0)
    model, mask = Tokens(), torch.eye(3, dtype=torch.int64)
    data = [{"input_ids": torch.randint(9, (3, 3)), "attention_mask": mask} for _ in range(2)]
    names = ["head.weight", "head.bias"]
    exact = nm.fisher_diagonal(model, data, nm.Exact(), parameters=names)
    fused = nm.fisher_diagonal(model, data, nm.Hutchinson(), parameters=names, granularity="sample")
    for name in names:
        torch.testing.assert_close(fused[name], exact[name], rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("number", "make"), [(0, lambda good, bad: [bad, good]), (1, lambda good, bad: [good, bad])])
def test_a_run_names_the_batch_with_nan(number: int, make: Callable[..., list[Tensor]]) -> None:
    data = make(torch.ones(2, 3), torch.full((2, 3), NAN))
    with pytest.raises(ValueError, match=rf"Batch {number} of `data`: `logits`.*NaN or infinity at index \[0\]"):
        nm.fisher_diagonal(torch.nn.Linear(3, 2), data, nm.Hutchinson())
