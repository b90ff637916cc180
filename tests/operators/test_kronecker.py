"""Kronecker factors and corrected eigenvalues against their definitions, and against dense F."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.operators.kronecker import run as kronecker_run
from neuromanifold.operators.kronecker.blocks import nearest
from neuromanifold.persample.accumulate import fourth_powers
from neuromanifold.persample.accumulate.factors import add_gram
from neuromanifold.reference import kronecker as reference
from neuromanifold.reference import network
from tests.operators.dense import SOME, dense, relative_error
from tests.problem.test_unchanged import model as nosy
from tests.problem.test_unchanged import same, snapshot
from tests.problems.problem import Net
from tests.run.test_contract import MODEL, X, batches
from tests.zscores import allowed_z_score, worst_z_score

pytestmark = pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
F = network.reference_matrix(MODEL, lambda m: m(X))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(model: nn.Module, data: Any, **options: Any) -> nm.KroneckerFisher:
    return nm.fisher_kronecker(model, data, nm.Exact(), reduction="sum", **options)


def index_of(found: nm.KroneckerFisher, names: tuple[str, ...]) -> Tensor:
    places = [found.layout.slices[name] for name in names]
    return torch.cat([torch.arange(place.start, place.stop) for place in places])


def in_blocks(found: nm.KroneckerFisher, f: Tensor) -> Tensor:
    """F with zeros outside of the blocks of a result."""
    expected = torch.zeros_like(f)
    for block in found.blocks.values():
        index = index_of(found, block.names)
        expected[index[:, None], index] = f[index[:, None], index]
    return expected


# Where theory says that it is F.


def linear_network(sizes: list[int], bias: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(i, o, bias) for i, o in pairwise(sizes))).double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [[4, 3], [4, 1], [4, 5, 3], [4, 1, 3, 2]], ids=str)
@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
def test_it_is_f_for_deep_linear_networks(sizes: list[int], bias: bool, eigenvalues: Any) -> None:
    """With Gaussian outputs the gradients of outputs are the same for all samples (Bernacchia et al. 2018)."""
    model = linear_network(sizes, bias)
    found = exact(model, [X[:5], X[5:9]], likelihood=nm.Gaussian, eigenvalues=eigenvalues)
    f = network.reference_matrix(model, lambda m: m(X[:9]), nm.Gaussian)
    assert relative_error(found.dense(), in_blocks(found, f)) < 1e-12
    assert found.corrected == (eigenvalues == "corrected")


def test_it_is_f_for_one_sample() -> None:
    """One class of rank one and one sample: G_n = l ⊗ r."""
    model = linear_network([4, 2], True)
    for eigenvalues in ("kronecker", "corrected"):
        found = exact(model, [X[:1]], eigenvalues=eigenvalues)
        assert relative_error(found.dense(), network.reference_matrix(model, lambda m: m(X[:1]))) < 1e-12


# The definitions.


def tokens() -> nn.Module:
    return Net(lambda m, x: m.head(torch.tanh(m.layer(x)).mean(1)), layer=nn.Linear(3, 4), head=nn.Linear(4, 3))


def images() -> nn.Module:
    parts = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2, bias=False, dilation=2)
    return nn.Sequential(*parts, nn.Flatten(), nn.LazyLinear(3))


def case(name: str) -> tuple[nn.Module, Tensor, list[str]]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model, x, layers = {
            "vectors": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), X[:7], ["0", "2"]),
            "tokens": lambda: (tokens(), torch.randn(5, 6, 3), ["layer", "head"]),
            "images": lambda: (images(), torch.randn(4, 2, 7, 5), ["0", "2", "4"]),
        }[name]()
        model(x.float())
        return model.double(), x.double(), layers


@pytest.mark.parametrize("corrected", [False, True], ids=["KFAC", "EKFAC"])
@pytest.mark.parametrize("name", ["vectors", "tokens", "images"])
def test_it_is_what_curvlinops_computes(name: str, corrected: bool) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, x, _ = case(name)
    data = [(x[:3], torch.zeros(3, dtype=torch.int64)), (x[3:], torch.zeros(len(x) - 3, dtype=torch.int64))]
    kind = curvlinops.EKFACLinearOperator if corrected else curvlinops.KFACLinearOperator
    options = {"check_deterministic": False, "num_per_example_loss_terms": 1, "separate_weight_and_bias": False}
    options |= {"fisher_type": "type-2", "num_data": len(x)}
    theirs = kind(model, nn.CrossEntropyLoss(reduction="mean"), list(model.parameters()), data, **options)
    found = nm.fisher_kronecker(model, data, nm.Exact(), eigenvalues="corrected" if corrected else "kronecker")
    eye = torch.eye(found.shape[0], dtype=torch.float64)
    assert relative_error(found.dense(), theirs @ eye) < 1e-12


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["vectors", "tokens", "images"])
def test_factors_and_eigenvalues_are_those_of_the_definition(name: str, sharing: Any) -> None:
    model, x, layers = case(name)
    found = exact(model, [x[:3], x[3:]], weight_sharing=sharing)
    f = network.reference_matrix(model, lambda m: m(x))
    for layer in layers:
        block = found.blocks[f"{layer}.weight"]
        left, right, terms = reference.kronecker_factors(model, lambda m: m(x), layer, sharing)
        torch.testing.assert_close(block.factors(), (left[None], right[None]))
        assert block.terms == terms
        index = index_of(found, block.names)
        expected = torch.kron(left, right) / terms
        order = torch.arange(expected.shape[0]).view(len(left), len(right))
        if len(block.names) == 2:  # the columns of the weight, then the bias
            order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
        order = order.flatten()
        torch.testing.assert_close(found.kronecker.dense()[index[:, None], index], expected[order[:, None], order])
        whole = torch.zeros_like(expected)
        whole[order[:, None], order] = f[index[:, None], index]
        values = reference.corrected_eigenvalues(whole, left, right)
        left_values, right_values = torch.linalg.eigvalsh(left), torch.linalg.eigvalsh(right)
        spread = [v[1:] - v[:-1] > 1e-6 * v[-1] for v in (left_values, right_values)]  # else no basis is the basis
        if all(bool(one.all()) for one in spread):
            torch.testing.assert_close(block.eigenvalues[0], values, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(block.eigenvalues.sum(), values.sum())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", SOME)
def test_no_parameter_is_dropped_and_correction_only_helps(name: str, sharing: Any) -> None:
    problem = SOME[name]
    options = {**problem.options, "shift_labels": False, "weight_sharing": sharing}
    found = exact(problem.model, problem.data, likelihood=problem.likelihood, **options)
    expected = in_blocks(found, dense(problem))
    for block in found.blocks.values():
        index = index_of(found, block.names)
        if block.kind in ("dense", "diagonal", "unused"):
            mine = found.dense()[index[:, None], index]
            torch.testing.assert_close(mine, expected[index[:, None], index], rtol=max(1e-6, problem.rtol), atol=1e-9)
    assert float(found.trace) == pytest.approx(float(expected.trace()), rel=max(problem.rtol, 1e-6))
    with_products = relative_error(found.kronecker.dense(), expected)
    assert relative_error(found.dense(), expected) <= with_products + 1e-9
    assert set(found.structure) == set(found.layout.shapes)


def test_groups_have_factors_of_their_own() -> None:
    """As several convolutions side by side; those with one channel each are dense."""
    torch.manual_seed(0)
    grouped = nn.Conv2d(4, 6, 2, groups=2).double()
    x = torch.randn(3, 4, 3, 3).double()
    head = nn.Sequential(nn.Flatten(), nn.Linear(24, 3)).double()
    apart = [nn.Conv2d(2, 3, 2).double() for _ in range(2)]
    for i, conv in enumerate(apart):
        conv.load_state_dict({k: v[3 * i : 3 * i + 3] for k, v in grouped.state_dict().items()})
    found = exact(nn.Sequential(grouped, head), [x]).blocks["0.weight"]
    model = Net(lambda m, x: m.head(torch.cat([m.a(x[:, :2]), m.b(x[:, 2:])], 1)), a=apart[0], b=apart[1], head=head)
    others = exact(model, [x]).blocks
    for side in (0, 1):
        expected = torch.cat([others[f"{name}.weight"].factors()[side] for name in "ab"])
        torch.testing.assert_close(found.factors()[side], expected)
    assert found.how == "Kronecker 3 x 9, 2 groups"
    depthwise = exact(
        nn.Sequential(nn.Conv1d(40, 40, 3, groups=40), nn.Flatten(), nn.Linear(40, 2)),
        [x[:, 0, :1].float().expand(3, 40, 3)],
        max_block=50,
    )
    assert depthwise.structure["0.weight"] == "dense, 40 rows of 3"


def test_a_weight_stored_the_other_way_round() -> None:
    """The Conv1D of transformers, and x @ w, with the factors of nn.Linear, exchanged; for several passes, too."""
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    x, linear, turned = torch.randn(5, 3, 4).double(), nn.Linear(4, 3).double(), Conv1D(3, 4).double()
    turned.weight.data, turned.bias.data = linear.weight.data.mT.clone(), linear.bias.data.clone()
    direct = Net(lambda m, x: (x @ m.weight + m.bias).sum(1), weight=turned.weight, bias=turned.bias)
    for estimator in (nm.Exact(), nm.Hutchinson(2)):
        found = [
            nm.fisher_kronecker(model, [x], estimator)
            for model in (Net(lambda m, x: m.a(x).sum(1), a=linear), Net(lambda m, x: m.a(x).sum(1), a=turned), direct)
        ]
        blocks = [next(iter(one.blocks.values())) for one in found]
        for one in blocks[1:2]:
            torch.testing.assert_close(one.factors()[::-1], blocks[0].factors())
            assert (one.how, one.turned) == ("Kronecker 5 x 3", True)
        torch.testing.assert_close(found[1].trace.value, found[0].trace.value)
        a, b = (f.diagonal()["a.weight"] for f in found[:2])
        torch.testing.assert_close(b.mT, a)


def test_embeddings() -> None:
    """Counts of words on one side; words that stand for padding have no gradient."""
    torch.manual_seed(0)
    model = Net(lambda m, x: m.head(m.table(x).sum(1)), table=nn.Embedding(7, 3, padding_idx=0), head=nn.Linear(3, 3))
    ids = torch.tensor([[1, 2, 0], [2, 2, 3], [0, 6, 0]])
    block = exact(model.double(), [ids]).kronecker.blocks["table.weight"]
    left, _ = block.factors()
    assert left.tolist() == [[0, 1, 3, 1, 0, 0, 1]]
    assert (block.terms, block.how) == (6, "Kronecker diag 7 x 3")
    assert float(block.eigenvalues[0, 0].abs().max()) == 0


def test_the_nearest_product_to_a_sum() -> None:
    g = generator()
    lefts = [torch.rand(1, 5, generator=g, dtype=torch.float64) for _ in range(2)]
    rights = [(a @ a.mT)[None] for a in torch.randn(2, 3, 3, generator=g, dtype=torch.float64)]
    parts = [(left, right, 2.0 + i) for i, (left, right) in enumerate(zip(lefts, rights, strict=True))]
    total = sum(torch.kron(left[0].diag(), right[0]) / t for left, right, t in parts)
    left, right = nearest(parts)
    error = (torch.kron(left[0].diag(), right[0]) - total).norm()
    rearranged = total.view(5, 3, 5, 3).permute(0, 2, 1, 3).reshape(25, 9)  # the best is its leading singular pair
    assert float(error) == pytest.approx(float(torch.linalg.svdvals(rearranged)[1:].norm()), rel=1e-8)
    assert float(left.min()) > 0


def test_limits() -> None:
    found = exact(MODEL, batches(16), max_side=6)
    assert found.structure == {
        name: {"0": "Kronecker diag 8 x 5", "2": "Kronecker 3 x diag 9"}[name[0]] for name in found.layout.shapes
    }
    assert relative_error(found.dense(), in_blocks(found, F)) < 0.8
    torch.testing.assert_close(found.trace.value, float(F.trace()))
    norms = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    f = network.reference_matrix(norms, lambda m: m(X))
    for most, kind in ((6, "dense"), (5, "diagonal")):
        found = exact(norms, batches(16), max_block=most)
        assert found.structure["1.weight"] == kind
        expected = f.diagonal()[found.layout.slices["1.weight"]]
        torch.testing.assert_close(found.diagonal()["1.weight"], expected)


class Attends(nn.Module):
    """Three layers with the same inputs; from the second batch on, one has others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.query(h) * self.key(h) + self.value(h + 1.0 if len(x) < 16 else h)


def test_layers_with_the_same_inputs_share_a_factor() -> None:
    model, data = Attends().double(), [X[:16], X[16:32], X[32:40]]
    shared = nm.fisher_kronecker(model, data[:2], nm.MonteCarlo(), seed=3)
    assert shared.blocks["query.weight"].right is shared.blocks["value.weight"].right
    found = nm.fisher_kronecker(model, data, nm.MonteCarlo(), seed=3)
    blocks = [found.blocks[f"{name}.weight"] for name in ("query", "key", "value")]
    assert blocks[0].right is blocks[1].right
    assert blocks[0].right is not blocks[2].right
    h = torch.tanh(model.first(torch.cat(data))).detach()
    others = torch.cat([h[:32], h[32:] + 1.0])
    for block, inputs in zip(blocks, (h, h, others), strict=True):
        extended = torch.cat([inputs, torch.ones(40, 1)], 1)
        torch.testing.assert_close(block.factors()[1][0], extended.mT @ extended)
    copied = nm.fisher_kronecker(Copies(model), data, nm.MonteCarlo(), seed=3)
    torch.testing.assert_close(found.dense(), copied.dense())


class Copies(nn.Module):
    """The same model, where each layer has a copy of its inputs."""

    def __init__(self, model: Attends) -> None:
        super().__init__()
        self.first, self.query, self.key, self.value = model.first, model.query, model.key, model.value

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.query(h.clone()) * self.key(h.clone()) + self.value(h + 1.0 if len(x) < 16 else h.clone())


# Random estimators.

SMALL = [X[:12]]


def spread(seeds: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Corrected eigenvalues minus those of F in the same basis, and their variance as reported, for many seeds."""
    f = network.reference_matrix(MODEL, lambda m: m(X[:12]))
    errors, variances = [], []
    for seed in range(seeds):
        found = nm.fisher_kronecker(MODEL, SMALL, seed=seed, reduction="sum", **options)
        pieces, noise = [], []
        for block in found.blocks.values():
            unit = torch.eye(block.eigenvalues.numel(), dtype=torch.float64).view(-1, *block.eigenvalues.shape)
            basis = torch.zeros(67, len(unit), dtype=torch.float64)
            block.scatter(block.back(unit), basis, found.layout.slices)
            pieces.append(block.eigenvalues.flatten() - (basis * (f @ basis)).sum(0))
            noise.append(block.stderr.flatten().square())
        errors.append(torch.cat(pieces))
        variances.append(torch.cat(noise))
    return torch.stack(errors), torch.stack(variances)


@pytest.mark.parametrize(
    "estimator", [nm.Hutchinson(), pytest.param(nm.MonteCarlo(2), marks=pytest.mark.slow)], ids=repr
)
def test_corrected_eigenvalues_are_unbiased(estimator: nm.Estimator) -> None:
    errors, variances = spread(70, estimator=estimator)
    assert worst_z_score(errors, torch.zeros(67, dtype=torch.float64)) < allowed_z_score(67)
    spreads = errors.var(0)
    large = spreads > 0.01 * spreads.max()
    assert float((variances.mean(0) / spreads)[large].min()) > 0.7  # error bars are not too small


def test_all_fourth_powers_are_taken_where_few_samples_carry_f(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the diagonal; without this rule, as in a twin, error bars are others."""
    x = torch.randn(20, 32, 6, generator=generator())
    x[:, 1:] *= 100  # but for one sample of each batch, predictions are certain
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False))
    monkeypatch.setattr(fourth_powers, "_MANY", 2.0)  # the other rule

    def errors() -> Tensor:
        blocks = nm.fisher_kronecker(model, list(x), nm.Hutchinson(deflate=0)).blocks.values()
        return torch.cat([block.stderr.flatten() for block in blocks])

    found = errors()
    with monkeypatch.context() as patch:
        patch.setattr(fourth_powers, "_EVEN", 0.0)
        twin = errors()
    monkeypatch.setattr(fourth_powers, "_ALL_OF", 10**9)
    full = errors()
    assert torch.equal(found, full)
    assert not torch.allclose(twin, full, rtol=0.05)


def test_with_the_noise_of_the_basis_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first eigenvectors fit the noise that they were made from: the biased twin."""
    monkeypatch.setattr(kronecker_run, "batch_seed", lambda seed, _: seed)
    errors, _ = spread(70, estimator=nm.Hutchinson())
    assert worst_z_score(errors, torch.zeros(67, dtype=torch.float64)) > allowed_z_score(67)


@pytest.mark.parametrize("estimator", [nm.Hutchinson(2), nm.MonteCarlo(), nm.Adaptive(1.0), nm.Adaptive(0.7)], ids=repr)
def test_factors_are_unbiased(estimator: nm.Estimator) -> None:
    """Also where samples without a pass are made up for by others; the inputs count once, not once for each pass."""
    data = batches(32)
    expected = exact(MODEL, data, eigenvalues="kronecker").blocks["2.weight"].factors()
    found = [
        nm.fisher_kronecker(MODEL, data, estimator, seed=seed, eigenvalues="kronecker").blocks["2.weight"].factors()
        for seed in range(30)
    ]
    for side in (0, 1):
        values = torch.stack([one[side] for one in found])
        assert worst_z_score(values, expected[side]) < allowed_z_score(values[0].numel())
        assert worst_z_score(1.2 * values, expected[side]) > allowed_z_score(values[0].numel()) or not side


def test_the_empirical_fisher() -> None:
    found = nm.fisher_kronecker(MODEL, batches(16), nm.Empirical())
    expected = nm.fisher_diagonal(MODEL, batches(16), nm.Empirical())
    assert float(found.trace) == pytest.approx(float(expected.trace))


# What follows from them, against the dense matrix.


@pytest.mark.parametrize("view", ["mean", "sum"])
@pytest.mark.parametrize("name", ["MLP", "depthwise conv", "GPT-2 (tokens, tied)", "frozen and unused"])
def test_everything_agrees_with_the_dense_matrix(name: str, view: str) -> None:
    problem = SOME[name]
    found = nm.fisher_kronecker(problem.model, problem.data, likelihood=problem.likelihood, **problem.options)
    found = getattr(found, view)
    f = found.dense()
    torch.testing.assert_close(f, f.mT)
    size = len(f)
    v = torch.randn(size, 3, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(found @ v, f @ v)
    torch.testing.assert_close(
        found.layout.flatten(found @ found.layout.split(v[:, 0]), f.dtype, f.device), f @ v[:, 0]
    )
    damped = f + 0.1 * torch.eye(size, dtype=f.dtype)
    torch.testing.assert_close(found.solve(v, 0.1).x, torch.linalg.solve(damped, v))
    assert found.solve(v, 0.1).residual < 1e-10
    root = found.inverse_square_root(torch.eye(size, dtype=f.dtype), 0.1)
    torch.testing.assert_close(root @ root @ damped, torch.eye(size, dtype=f.dtype))
    assert found.log_determinant(0.1) == pytest.approx(float(torch.logdet(damped)))
    torch.testing.assert_close(found.eigenvalues(), torch.linalg.eigvalsh(f).flip(0), rtol=1e-8, atol=1e-10)
    pairs = found.eigenpairs(4)
    torch.testing.assert_close(f @ pairs.vectors, pairs.vectors * pairs.values)
    torch.testing.assert_close(pairs.values, found.eigenvalues()[:4])
    assert found.frobenius_norm == pytest.approx(float(f.norm()))
    assert float(found.trace) == pytest.approx(float(f.trace()))
    assert found.length(v[:, 0]) == pytest.approx(float((v[:, 0] @ f @ v[:, 0]).sqrt()))
    torch.testing.assert_close(found.layout.flatten(found.diagonal(), f.dtype, f.device), f.diagonal())
    layer = next(iter(found.layout.layers()))
    own = [i for n in found.layout.layers()[layer] for i in index_of(found, (n,)).tolist()]
    torch.testing.assert_close(found.layer(layer).dense(), f[own][:, own])


def test_samples_have_the_covariance_of_the_inverse() -> None:
    found = nm.fisher_kronecker(MODEL, batches(16))
    draws = found.sample(3000, damping=0.05, seed=1)
    assert draws["0.weight"].shape == (3000, 8, 4)
    flat = torch.cat([value.flatten(1) for value in draws.values()], 1)
    expected = torch.linalg.inv(found.dense() + 0.05 * torch.eye(67, dtype=torch.float64))
    products = flat[:, :, None] * flat[:, None]
    assert worst_z_score(products, expected) < allowed_z_score(67 * 67)
    assert worst_z_score(1.3 * products, expected) > allowed_z_score(67 * 67)


# As a value.


def test_factors_of_parts_add_up() -> None:
    options: dict[str, Any] = {"eigenvalues": "kronecker", "seed": 3}
    whole = nm.fisher_kronecker(MODEL, batches(16), **options)
    parts = [nm.fisher_kronecker(MODEL, batches(16), shard=(i, 3), **options) for i in range(3)]
    together = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(together.dense(), whole.dense())
    assert (together.count, together.positions) == (64, 64)
    # corrected eigenvalues in their basis add, too
    data = batches(16)
    corrected = [nm.fisher_kronecker(MODEL, data, basis=together, shard=(i, 2), seed=4) for i in range(2)]
    expected = nm.fisher_kronecker(MODEL, data, basis=together, seed=4)
    added = corrected[0] + corrected[1]
    torch.testing.assert_close(added.dense(), expected.dense())
    for name, block in added.blocks.items():
        torch.testing.assert_close(block.stderr, expected.blocks[name].stderr)
    alone = [nm.fisher_kronecker(MODEL, [batch], seed=i) for i, batch in enumerate(data[:2])]
    with pytest.raises(ValueError, match=r"eigenvalues have the same basis.*as `basis`"):
        alone[0] + alone[1]


def test_scaling_saving_and_loading(tmp_path: Path) -> None:
    problem = SOME["DistilBERT"]
    for eigenvalues in ("corrected", "kronecker"):
        found = nm.fisher_kronecker(problem.model, problem.data, eigenvalues=eigenvalues)
        found.save(tmp_path / "f.safetensors")
        again = nm.load(tmp_path / "f.safetensors")
        assert isinstance(again, nm.KroneckerFisher)
        assert torch.equal(again.dense(), found.dense())
        assert torch.equal(again.kronecker.dense(), found.kronecker.dense())
        assert (str(again), again.structure, again.positions) == (str(found), found.structure, found.positions)
        assert again.corrected == (eigenvalues == "corrected")
        torch.testing.assert_close((2 * again).dense(), 2 * found.dense())
        torch.testing.assert_close((2 * again).kronecker.dense(), 2 * found.kronecker.dense())
        assert again.to(torch.float32).dense().dtype == torch.float32


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 513, 1023])
def test_halved_products_are_the_lower_triangle_of_the_whole(size: int) -> None:
    rows = torch.randn(5, size, generator=generator(), dtype=torch.float64)
    found = torch.zeros(size + 1, size + 1, dtype=torch.float64)
    add_gram(found[:size, :size], rows)
    torch.testing.assert_close(found[:size, :size].tril(), (rows.mT @ rows).tril())
    assert not found[-1].any()
    assert not found[:, -1].any()


def test_large_factors_are_those_of_small_pieces() -> None:
    """Sides above the size from which products are halved, with a bias, in batches and at once."""
    model = linear_network([300, 260, 2], bias=True)
    x = torch.randn(9, 300, generator=generator(), dtype=torch.float64)
    left, right, terms = reference.kronecker_factors(model, lambda m: m(x), "0")
    block = exact(model, list(x.split(4)), eigenvalues="kronecker").blocks["0.weight"]
    for found, expected in zip(block.factors(), (left, right), strict=True):
        torch.testing.assert_close(found[0], expected)
    assert block.terms == terms


def test_without_error_bars_eigenvalues_are_the_same(tmp_path: Path) -> None:
    data, options = batches(16), {"estimator": nm.Hutchinson(), "seed": 3}
    expected = nm.fisher_kronecker(MODEL, data, **options)
    found = nm.fisher_kronecker(MODEL, data, error_bars=False, **options)
    assert torch.equal(found.dense(), expected.dense())
    assert found.corrected
    assert math.isnan(found.trace.stderr)
    assert expected.trace.stderr > 0
    found.save(tmp_path / "f.safetensors")
    again = nm.load(tmp_path / "f.safetensors")
    assert isinstance(again, nm.KroneckerFisher)
    assert math.isnan((2 * again).trace.stderr)
    exactly = nm.fisher_kronecker(MODEL, data, nm.Exact(), error_bars=False)
    assert exactly.trace.stderr == 0


def test_it_prints_a_table() -> None:
    lines = str(exact(MODEL, batches(16))).splitlines()
    assert "67 parameters in 2 blocks, eigenvalues corrected, 64 samples, Exact" in lines[0]
    assert lines[3].split()[:4] == ["0.weight+bias", "Kronecker", "8", "x"]


def test_a_checkpoint_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    class Ends(list):  # type: ignore[type-arg]
        fails_in = 0

        def __iter__(self) -> Any:
            for i, item in enumerate(super().__iter__()):
                if self.fails_in == i + 1:
                    raise RuntimeError("power cut")
                yield item
            self.fails_in -= 10

    options = {"seed": 2, "checkpoint": nm.Checkpoint(tmp_path / "c", every=0)}
    expected = nm.fisher_kronecker(MODEL, batches(16), seed=2)
    for first in (3, 13):  # in the first pass, in the second
        data = Ends(batches(16))
        data.fails_in = first
        with pytest.raises(RuntimeError, match="power cut"):
            nm.fisher_kronecker(MODEL, data, **options)
        data.fails_in = 0
        found = nm.fisher_kronecker(MODEL, data, **options)
        assert torch.equal(found.dense(), expected.dense())
        for name, block in found.blocks.items():
            assert torch.equal(block.stderr, expected.blocks[name].stderr)
        for path in tmp_path.iterdir():
            path.unlink()


def test_a_checkpoint_without_error_bars_does_not_go_on_with_them(tmp_path: Path) -> None:
    nm.fisher_kronecker(MODEL, batches(16), checkpoint=tmp_path / "c", error_bars=False)
    with pytest.raises(ValueError, match=r"differs in error_bars \(False, now True\)"):
        nm.fisher_kronecker(MODEL, batches(16), checkpoint=tmp_path / "c")


# What is refused.


def test_nothing_changes() -> None:
    m = nosy()
    before = snapshot(m)
    nm.fisher_kronecker(m, [torch.ones(4, 4)] * 2)
    assert same(before, snapshot(m))
    with pytest.raises(ValueError, match="the same batches in each pass"):  # in the second pass
        nm.fisher_kronecker(m, Augmented(X.float()))
    assert same(before, snapshot(m))


def test_what_is_singular_is_named() -> None:
    problem = SOME["frozen and unused"]
    found = nm.fisher_kronecker(problem.model, problem.data)
    v = torch.ones(found.shape[0], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"`damping` must be a number > 0 for a singular F, got 0, where .* are zero"):
        found.solve(v)
    with pytest.raises(ValueError, match=r"unused\.weight"):
        found.layer("unused").inverse_square_root(v[:6])
    with pytest.raises(ValueError, match="`damping` must be a number > 0"):
        found.log_determinant(0.0)
    assert found.structure["unused.weight"] == "unused"
    assert float((found @ v)[-6:].abs().max()) == 0
    regular = nm.fisher_kronecker(linear_network([4, 2], True), [X], likelihood=nm.Gaussian)
    assert regular.solve(torch.ones(10, dtype=torch.float64)).residual < 1e-10


class Experts(nn.Module):
    """Each sample goes to one of three linear layers; none goes to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, 3]."""
        chosen, found = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            found = found.index_add(0, rows, expert(x[rows]))
        return self.head(found)


def test_layers_without_samples() -> None:
    model = Experts().double()
    found, f = exact(model, [X[:30], X[30:]]), network.reference_matrix(model, lambda m: m(X))
    assert float(found.trace) == pytest.approx(float(f.trace()))
    v = torch.ones(found.shape[0], dtype=torch.float64)
    assert float(found.layer("experts.2").trace) == 0
    with pytest.raises(ValueError, match=r"eigenvalues of experts\.2\.weight .* are zero"):
        found.layer("experts.2").solve(v[:20])
    assert found.solve(v, 1e-3).residual < 1e-10
    apart = [X[X[:, 0] > 0], X[X[:, 0] <= 0]]  # a layer that has samples in the second batch only
    with pytest.raises(ValueError, match=r"`gradients of experts\.1\.weight` must be of the same kind in all batches"):
        exact(model, apart)


class Augmented:
    """Data that are others in each pass."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Any:
        self.x = self.x + 1
        return iter([self.x])


def test_wrong_arguments() -> None:
    found = nm.fisher_kronecker(MODEL, batches(16))
    with pytest.raises(ValueError, match="`eigenvalues` must be 'corrected' or 'kronecker'"):
        nm.fisher_kronecker(MODEL, batches(16), eigenvalues="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`weight_sharing` must be"):
        nm.fisher_kronecker(MODEL, batches(16), weight_sharing="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`estimator` must be one that squares per-sample gradients"):
        nm.fisher_kronecker(MODEL, batches(16), nm.SquaredBatchGradient())
    with pytest.raises(TypeError, match="`data` must be a list"):
        nm.fisher_kronecker(MODEL, iter(batches(16)))
    assert nm.fisher_kronecker(MODEL, iter(batches(16)), eigenvalues="kronecker").count == 64
    with pytest.raises(ValueError, match="the same batches in each pass"):
        nm.fisher_kronecker(MODEL, Augmented(X))
    with pytest.raises(ValueError, match="`basis` must be given for corrected eigenvalues of a shard"):
        nm.fisher_kronecker(MODEL, batches(16), shard=(0, 2))
    with pytest.raises(ValueError, match="`basis` must be None"):
        nm.fisher_kronecker(MODEL, batches(16), eigenvalues="kronecker", basis=found)
    with pytest.raises(TypeError, match=r"`basis` must be an nm.KroneckerFisher"):
        nm.fisher_kronecker(MODEL, batches(16), basis=3)  # type: ignore[arg-type]
    other = linear_network([4, 3], True)
    with pytest.raises(ValueError, match="`basis` must be a result of the same parameters of the same model"):
        nm.fisher_kronecker(other, batches(16), basis=found)
    with pytest.raises(ValueError, match="`v` must be"):
        found @ {name: p.detach() for name, p in other.named_parameters()}
    with pytest.raises(ValueError, match="`other` must be a result of the model"):
        found + nm.fisher_kronecker(other, batches(16))
    with pytest.raises(ValueError, match="`name` must be one of"):
        found.layer("7")
    with pytest.raises(ValueError, match="at least one sample"):
        nm.fisher_kronecker(MODEL, [X[:0]])


def test_float32_and_half_precision_models() -> None:
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        model.load_state_dict(MODEL.state_dict())
        found = exact(model, [X.to(dtype)])
        assert found.precision == torch.float32
        assert float(found.trace) == pytest.approx(float(F.trace()), rel=error)


class Segments(nn.Module):
    """Adds rows to samples: two to each, or other numbers, as the first entry says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        owners = torch.tensor([0, 0, 1, 1] if x[0, 0, 0] < 0 else [0, 0, 0, 1])
        rows = self.layer(x.flatten(0, 1)).tanh()
        return self.head(torch.zeros(2, 4).index_add(0, owners, rows))


def test_a_basis_of_products_does_not_take_rows_that_samples_have_in_other_numbers() -> None:
    model, x = Segments(), torch.ones(2, 2, 4)
    basis = nm.fisher_kronecker(model, [-x])
    with pytest.raises(ValueError, match=r"gradients of layer.weight.*of the kind that the basis is for"):
        nm.fisher_kronecker(model, [x], basis=basis)
