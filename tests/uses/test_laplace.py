"""Laplace posteriors against closed forms of Bayesian linear regression, and a slow reference in float64."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from neuromanifold.reference.network import jacobian
from tests.zscores import allowed_z_score, worst_z_score

NOISE, PRIOR, DRAWS = 0.3, 0.7, 1500


def regression(orthogonal: bool = True) -> tuple[nn.Linear, Tensor, Tensor, Callable[[Tensor], nm.Core]]:
    """A linear model at its ridge solution; with orthogonal columns its Fisher information is diagonal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 4, generator=generator, dtype=torch.float64)
    if orthogonal:
        x = torch.linalg.qr(x).Q * torch.tensor([1.0, 3.0, 0.2, 2.0], dtype=torch.float64)
    y = torch.randn(13, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(precision(x), x.T @ y / NOISE).T)
    return model, x, y, gaussian


def gaussian(mean: Tensor) -> nm.Gaussian:
    return nm.Gaussian(mean, NOISE)


def precision(x: Tensor, prior: float = PRIOR) -> Tensor:
    return x.T @ x / NOISE + prior * torch.eye(x.shape[1], dtype=x.dtype)


def evidence(x: Tensor, y: Tensor, prior: float) -> float:
    """log N(y; 0, σ² + X Xᵀ/δ): the marginal likelihood by definition."""
    covariance = NOISE * torch.eye(len(x), dtype=x.dtype) + x @ x.T / prior
    return float(torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), covariance).log_prob(y[:, 0]))


class Full:
    """The whole matrix of a model with one parameter, as a curvature."""

    def __init__(self, matrix: Tensor, shape: torch.Size) -> None:
        self.values, self.vectors = torch.linalg.eigh(matrix)
        self.shape, self.blocks = shape, [("weight",)]

    def eigenvalues(self, _: Any) -> Tensor:
        return self.values

    def rotate(self, _: Any, values: Sequence[Tensor]) -> Tensor:
        return values[0].flatten(1) @ self.vectors

    def rotate_back(self, _: Any, values: Tensor) -> list[Tensor]:
        return [(values @ self.vectors.T).view(-1, *self.shape)]


def posterior(orthogonal: bool) -> tuple[nm.Laplace, Tensor, Tensor]:
    model, x, y, likelihood = regression(orthogonal)
    fim = nm.fisher_diagonal(model, [(x[:6], y[:6]), (x[6:], y[6:])], nm.Exact(), likelihood)
    laplace = nm.Laplace(model, fim, PRIOR, likelihood)
    if not orthogonal:
        laplace.curvature = Full(x.T @ x / NOISE, model.weight.shape)
    return laplace, x, y


def test_of_a_linear_model_the_kronecker_form_is_the_whole_matrix() -> None:
    model, x, y, likelihood = regression(orthogonal=False)
    data = [(x[:6], y[:6]), (x[6:], y[6:])]
    for eigenvalues in ("kronecker", "corrected"):
        fim = nm.fisher_kronecker(model, data, nm.Exact(), likelihood, eigenvalues)  # type: ignore[arg-type]
        laplace = nm.Laplace(model, fim, PRIOR, likelihood)
        assert laplace.log_marginal_likelihood([(x, y)]) == pytest.approx(evidence(x, y, PRIOR), rel=1e-10)
        expected = NOISE + torch.einsum("ni,ij,nj->n", x, torch.linalg.inv(precision(x)), x)[:, None]
        torch.testing.assert_close(laplace.predict([x]).variance, expected)


@pytest.mark.parametrize("orthogonal", [True, False], ids=["diagonal", "another curvature"])
def test_linear_regression_has_its_closed_form(orthogonal: bool) -> None:
    laplace, x, y = posterior(orthogonal)
    assert laplace.log_marginal_likelihood([(x, y)]) == pytest.approx(evidence(x, y, PRIOR), rel=1e-10)
    new = torch.randn(5, 4, dtype=torch.float64)
    expected = NOISE + torch.einsum("ni,ij,nj->n", new, torch.linalg.inv(precision(x)), new)[:, None]
    for method in ("probit", "linearised"):
        predicted = laplace.predict([new[:2], new[2:]], method)
        torch.testing.assert_close(predicted.mean, new @ laplace.model.weight.detach().T)
        torch.testing.assert_close(predicted.variance, expected)


@pytest.mark.parametrize("orthogonal", [True, False], ids=["diagonal", "another curvature"])
def test_draws_have_the_posterior_s_moments(orthogonal: bool) -> None:
    laplace, x, _ = posterior(orthogonal)
    draws = torch.cat([laplace.sample(seed)["weight"] for seed in range(DRAWS)]) - laplace.model.weight.detach()
    products = draws[:, :, None] * draws[:, None, :]
    allowed = allowed_z_score(20)
    assert worst_z_score(draws, torch.zeros(4).double()) < allowed
    assert worst_z_score(products, torch.linalg.inv(precision(x))) < allowed
    biased = torch.linalg.inv(x.T @ x / NOISE / len(x) + PRIOR * torch.eye(4).double())  # the mean taken for the sum
    assert worst_z_score(products, biased) > allowed


def test_sampled_predictions_of_a_linear_model_are_the_linearised_ones() -> None:
    laplace, x, _ = posterior(orthogonal=True)
    exact = laplace.predict([x[:3]], "linearised")
    found = laplace.predict([x[:3]], "sampled", samples=DRAWS)
    spread = exact.variance - NOISE
    assert float(((found.mean - exact.mean) / (spread / DRAWS).sqrt()).abs().max()) < allowed_z_score(3)
    z = (found.variance - exact.variance) / (spread * math.sqrt(2 / DRAWS))
    assert float(z.abs().max()) < allowed_z_score(3)


@pytest.mark.parametrize("per", ["model", "tensor"])
def test_the_prior_of_most_evidence_is_found(per: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    data = [(torch.randn(30, 3).double(), torch.randint(4, (30,)))]
    best = nm.Laplace(model, nm.fisher_diagonal(model, data, nm.Exact())).optimize_prior_precision(per)
    most = best.log_marginal_likelihood(data)
    assert len(set(best.prior_precision.values())) == (1 if per == "model" else 4)
    groups = [list(best.prior_precision)] if per == "model" else [[name] for name in best.prior_precision]
    for group in groups:
        for factor in (0.9, 1.1, 1e-6, 1e6):
            other = {n: v * (factor if n in group else 1) for n, v in best.prior_precision.items()}
            laplace = nm.Laplace(model, nm.fisher_diagonal(model, data, nm.Exact()), other)
            assert laplace.log_marginal_likelihood(data) < most


class Bare(nn.Module):
    """A parameter of its own, a layer called twice, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x * self.scale)))) * self.scale)


def bert() -> tuple[nn.Module, Any, Callable[[nn.Module], Tensor]]:
    transformers = pytest.importorskip("transformers", reason="needs neuromanifold[hf]")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=16, num_labels=3, **size)
    model = transformers.BertForSequenceClassification(config)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    batch = {"input_ids": torch.randint(11, (3, 4)), "attention_mask": mask}
    return model, batch | {"labels": torch.tensor([0, 2, 1])}, lambda m: m(**batch).logits


def convolution() -> tuple[nn.Module, Any, Callable[[nn.Module], Tensor]]:
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(75, 3)]
    return nn.Sequential(*layers), (x, torch.tensor([0, -100, 1])), lambda m: m(x)


def bare() -> tuple[nn.Module, Any, Callable[[nn.Module], Tensor]]:
    x = torch.randn(1, 3, dtype=torch.float64)
    return Bare(), x, lambda m: m(x)


def covariance_of(fim: nm.DiagonalFisher | nm.KroneckerFisher, prior: float) -> Tensor:
    """P⁻¹ as a dense matrix."""
    if isinstance(fim, nm.KroneckerFisher):
        whole = fim.sum.dense()
        return torch.linalg.inv(whole + prior * torch.eye(len(whole), dtype=whole.dtype))
    return torch.cat([1 / (fim.sums[name] + prior).flatten() for name in fim]).diag()


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("form", [nm.fisher_diagonal, nm.fisher_kronecker])
@pytest.mark.parametrize("make", [bert, convolution, bare])
def test_linearised_outputs_have_the_covariance_of_a_slow_reference(make: Callable[[], Any], form: Any) -> None:
    torch.manual_seed(1)
    model, batch, forward = make()
    model = model.double().eval()
    fim = form(model, [batch], nm.Exact())
    laplace = nm.Laplace(model, fim, 2.0)
    rows, z = jacobian(model, forward)  # [n, C, P]
    inverse = covariance_of(fim, 2.0)
    covariance = torch.einsum("ncp,pq,ndq->ncd", rows, inverse, rows)
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    expected = (z / (1 + math.pi / 8 * diagonal).sqrt()).softmax(-1)
    torch.testing.assert_close(laplace.predict([batch]).mean, expected)
    many = laplace.predict([batch], "linearised", samples=DRAWS, seed=3).mean
    drawn = torch.distributions.MultivariateNormal(z, covariance + 1e-12 * torch.eye(z.shape[1]).double())
    draws = drawn.sample((DRAWS,)).softmax(-1)
    z_score = (many - draws.mean(0)) / (draws.std(0) * math.sqrt(2 / DRAWS))
    assert float(z_score.abs().max()) < allowed_z_score(many.numel())


def network() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, [(torch.randn(9, 3).double(), torch.randint(3, (9,))) for _ in range(2)]


def test_draws_in_kronecker_form_have_the_covariance_of_the_inverse() -> None:
    model, data = network()
    fim = nm.fisher_kronecker(model, data, nm.Exact())
    laplace, means = nm.Laplace(model, fim, 3.0), torch.cat([p.detach().flatten() for p in model.parameters()])
    draws = [torch.cat([v.flatten() for v in laplace.sample(seed).values()]) - means for seed in range(DRAWS)]
    stacked = torch.stack(draws)
    products, expected = stacked[:, :, None] * stacked[:, None], covariance_of(fim, 3.0)
    assert worst_z_score(products.flatten(1), expected.flatten()) < allowed_z_score(expected.numel())
    assert worst_z_score(1.3 * products.flatten(1), expected.flatten()) > allowed_z_score(expected.numel())


def test_the_evidence_in_kronecker_form_is_that_of_the_dense_matrix() -> None:
    model, data = network()
    fim = nm.fisher_kronecker(model, data, nm.Exact())
    x, y = (torch.cat(side) for side in zip(*data, strict=True))
    fit, norm = -cross_entropy(model(x), y, reduction="sum"), sum(p.square().sum() for p in model.parameters())
    p = covariance_of(fim, 2.0)
    expected = fit + 0.5 * torch.logdet(p) + len(p) / 2 * math.log(2.0) - norm
    laplace = nm.Laplace(model, fim, 2.0)
    assert laplace.log_marginal_likelihood(data) == pytest.approx(float(expected.detach()))
    best = laplace.optimize_prior_precision("tensor")
    assert len(set(best.prior_precision.values())) == 2  # a weight and its bias share one
    most = best.log_marginal_likelihood(data)
    for name, other in (("0.weight", "0.bias"), ("2.weight", "2.bias")):
        for factor in (0.9, 1.1):
            changed = {n: v * (factor if n in (name, other) else 1) for n, v in best.prior_precision.items()}
            assert nm.Laplace(model, fim, changed).log_marginal_likelihood(data) < most


def test_wrong_results_in_kronecker_form() -> None:
    model, data = network()
    fim = nm.fisher_kronecker(model, data)
    with pytest.raises(ValueError, match=r"the same for all tensors of a Kronecker block.*0\.weight and 0\.bias"):
        nm.Laplace(model, fim, {"0.weight": 1.0, "0.bias": 2.0, "2.weight": 1.0, "2.bias": 1.0})
    with pytest.raises(ValueError, match=r"`fim` must be a result of the same parameters.*0\.weight has shape"):
        nm.Laplace(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), fim)
    with pytest.raises(ValueError, match="`fim` must be a result that was not scaled"):
        nm.Laplace(model, fim / 2)
    other, _ = network()
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="`fim` must be a result at the model's present weights"):
        nm.Laplace(other, fim)
    with pytest.raises(TypeError, match=r"nm\.DiagonalFisher or nm\.KroneckerFisher, got FisherMatrix"):
        nm.Laplace(model, nm.fisher_matrix(model, data))  # type: ignore[arg-type]


def test_a_binary_output_averages_to_its_integral() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(7, 3, dtype=torch.float64)
    fim = nm.fisher_diagonal(model, [x], nm.Exact(), nm.Bernoulli)
    laplace = nm.Laplace(model, fim, 0.2)
    variance = x.square() @ (1 / (fim.sums["weight"] + 0.2)).T + 1 / (fim.sums["bias"] + 0.2)
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weights = torch.softmax(-grid.square() / 2, 0)

    def moments(v: Tensor) -> tuple[Tensor, Tensor]:
        p = (model(x).detach() + v.sqrt() * grid).sigmoid()
        mean = (p * weights).sum(1, keepdim=True)
        return mean, (p.square() * weights).sum(1, keepdim=True) - mean.square()

    for method in ("linearised", "sampled"):
        found = laplace.predict([x], method, samples=DRAWS).mean
        for factor, passes in ((1.0, True), (9.0, False)):  # and a biased twin
            mean, spread = moments(variance * factor)
            z = (found - mean) / (spread / DRAWS).sqrt()
            assert (float(z.abs().max()) < allowed_z_score(7)) == passes


def digits() -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    return model, [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]


def test_nothing_of_the_model_changes_and_seeds_repeat() -> None:
    model, data = digits()
    before, fim = {name: value.clone() for name, value in model.state_dict().items()}, nm.fisher_diagonal(model, data)
    laplace = nm.Laplace(model, fim)
    joined = [torch.cat([x for x, _ in data])]
    for method in ("probit", "linearised", "sampled"):
        first, again = (laplace.predict(data, method, samples=3, seed=5) for _ in range(2))
        assert torch.equal(first.mean, again.mean)
        assert first.mean.shape == first.variance.shape == (15, 3)
        torch.testing.assert_close(first.mean.sum(1), torch.ones(15))
        if method != "linearised":
            torch.testing.assert_close(laplace.predict(joined, method, samples=3, seed=5).mean, first.mean)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.func.functional_call(model, laplace.sample(), data[0][0]).shape == (5, 3)


def test_every_view_means_the_same_and_a_part_stands_for_all() -> None:
    model, data = digits()
    fim = nm.fisher_diagonal(model, data, nm.Exact())
    values = [nm.Laplace(model, view).log_marginal_likelihood(data) for view in (fim.mean, fim.sum)]
    assert values[0] == values[1]
    part = nm.fisher_diagonal(model, data[:1], nm.Exact())
    of_part = nm.Laplace(model, part, samples=15)
    torch.testing.assert_close(of_part.curvature.eigenvalues(("0.weight",)), 3 * part.sums["0.weight"])


def test_a_last_layer_alone_moves() -> None:
    model, data = digits()
    laplace = nm.Laplace(model, nm.fisher_diagonal(model, data, parameters="3.*"))
    assert list(laplace.sample()) == ["3.weight", "3.bias"]
    assert "21 parameters, 15 samples" in repr(laplace)
    assert laplace.predict(data).mean.shape == (15, 3)


def test_tokens_are_predicted_by_sampling() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5))
    ids = torch.randint(7, (2, 3))
    labels = torch.tensor([[1, 2, -100], [0, -100, -100]])
    laplace = nm.Laplace(model, nm.fisher_diagonal(model, [(ids, labels)]))
    assert laplace.predict([(ids, labels)], "sampled", samples=4).mean.shape == (3, 5)
    with pytest.raises(ValueError, match=r"`logits` must be of shape \[B, C\].*method='sampled'"):
        laplace.predict([(ids, labels)])


def test_wrong_calls() -> None:
    model, data = digits()
    fim = nm.fisher_diagonal(model, data)
    laplace = nm.Laplace(model, fim)
    for prior in (0.0, -1.0, math.nan, True):
        with pytest.raises(ValueError, match=r"`prior_precision` must be a number > 0.*weight decay"):
            nm.Laplace(model, fim, prior)
    with pytest.raises(ValueError, match=r"`prior_precision` must be a number for each of 4 tensors.*0\.bias"):
        nm.Laplace(model, fim, {"0.weight": 1.0})
    with pytest.raises(TypeError, match=r"`fim` must be an nm\.DiagonalFisher or nm\.KroneckerFisher, got dict"):
        nm.Laplace(model, dict(fim.items()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`fim` must be a result that was not scaled.*any view"):
        nm.Laplace(model, fim / 15)
    with pytest.raises(ValueError, match=r"`fim`.*0\.weight has shape"):
        nm.Laplace(nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Tanh(), nn.Linear(6, 3)), fim)
    with pytest.raises(ValueError, match=r"`likelihood` must be the one .*Categorical, got Bernoulli"):
        nm.Laplace(model, fim, likelihood=nm.Bernoulli)
    with pytest.raises(ValueError, match=r"`likelihood` must be the one .*gaussian, got None"):
        nm.Laplace(model, nm.fisher_diagonal(model, [data[0][0]], likelihood=gaussian))
    with pytest.raises(ValueError, match=r"`fim` must be a Fisher information.*batch size"):
        nm.Laplace(model, nm.fisher_diagonal(model, data, nm.SquaredBatchGradient()))
    with pytest.raises(ValueError, match=r"`method` must be 'probit', 'linearised' or 'sampled'"):
        laplace.predict(data, "exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`data` must be the 15 training samples, got 5 samples"):
        laplace.log_marginal_likelihood(data[:1])
    with pytest.raises(ValueError, match="`data` must be batches with labels"):
        laplace.log_marginal_likelihood([x for x, _ in data])
    with pytest.raises(ValueError, match=r"`data`.*at least one"):
        laplace.predict([])
    zeroed, _ = digits()
    nn.init.zeros_(zeroed[0].bias)
    with pytest.raises(ValueError, match=r"all zero in 0\.bias.*scope='model'"):
        nm.Laplace(zeroed, nm.fisher_diagonal(zeroed, data)).optimize_prior_precision("tensor")
    running = nm.RunningFisher(model)
    running.step(model(data[0][0]))
    with pytest.raises(ValueError, match="`samples` must be given for a moving average"):
        nm.Laplace(model, running.diagonal())
    assert nm.Laplace(model, running.diagonal(), samples=15).samples == 15
    cross_entropy(model(data[0][0]), data[0][1]).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model[0].weight += 1
    for call in (lambda: laplace.predict(data), lambda: nm.Laplace(model, fim)):
        with pytest.raises(ValueError, match="`fim` must be a result at the model's present weights"):
            call()
