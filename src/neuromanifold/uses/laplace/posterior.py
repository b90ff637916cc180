"""`Laplace`: a Gaussian posterior over parameters from a Fisher information, what it predicts, and its evidence.

p(θ | data) ≈ N(θ̂, P⁻¹),  P = N F + δ     θ̂ the trained parameters, N F the sum over training samples, δ the precision
                                           of the prior: weight decay δ on the summed loss, δ/N on the mean loss;
                                           F is diagonal, or in Kronecker form (curvature.py)
sampled       mean over θ ~ N(θ̂, P⁻¹) of p(y | z(x, θ))
linearised    the same with z(x, θ̂) + J(θ - θ̂) in place of z(x, θ): Gaussian outputs with covariance J P⁻¹ Jᵀ
probit        softmax(z/√(1 + π v/8)), v the diagonal of that covariance, without random numbers
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from neuromanifold.core import Bernoulli, Categorical, Core, Gaussian
from neuromanifold.core.checks import finite_number, integer_in_range, message, one_of, random_seed
from neuromanifold.operators.jacobian import WithParameters
from neuromanifold.operators.kronecker import KroneckerFisher
from neuromanifold.problem.cotangents import Likelihood, batch_seed
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.results import DiagonalFisher
from neuromanifold.uses.laplace.covariance import output_covariances, unlabelled
from neuromanifold.uses.laplace.curvature import Block, Curvature, curvature_of, shapes_of
from neuromanifold.uses.matching import RESULT, check_weights, matched_shapes

Method = Literal["probit", "linearised", "sampled"]
_KNOWN: dict[str, type[Core]] = {"Categorical": Categorical, "Bernoulli": Bernoulli, "Gaussian": Gaussian}


class Prediction(NamedTuple):
    """Mean and variance of y for each output that counts; y is one-hot for classes, so that its mean is p(y | x)."""

    mean: Tensor  #: [N, C] probabilities, or [N, D] expected targets
    variance: Tensor  #: [N, C] or [N, D], the noise of the targets included


class Laplace:
    """A Gaussian posterior N(θ̂, (N F + δ)⁻¹) over the parameters of a result, around those of the model.

    N F is the sum over samples, which a result knows in every view.  Parameters that the result does not have stay
    where they are.  The model is referred to, and its present parameters are the posterior's mean.  Cost of a
    prediction: one forward pass for each drawn model, or the products with J of the linearised network.

    Args:
        model: the trained model at whose parameters `fim` was computed.
        fim: of `nm.fisher_kronecker`, with correlations within each layer, or of `nm.fisher_diagonal`, without any;
            over part of the training data if `samples` says how many there are in all.
        prior_precision: δ > 0, one for all parameters, or a mapping from the result's names to one for each tensor, the
            same for a weight and a bias that share a Kronecker block.
        likelihood: as in `nm.fisher_diagonal`; needed only if the result's was not one of the library's own classes.
        samples: how many training samples there are, N; the result's own count if not given.

    Raises:
        TypeError, ValueError: model and result do not fit, or an argument is out of range.

    Example:
        >>> fim = nm.fisher_kronecker(model, data, parameters="2.*")  # the last layer
        >>> laplace = nm.Laplace(model, fim).optimize_prior_precision()
        >>> laplace.predict(data).mean.shape  # probabilities [N, C]
        torch.Size([32, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        fim: DiagonalFisher | KroneckerFisher,
        prior_precision: float | Mapping[str, float] = 1.0,
        likelihood: Likelihood | None = None,
        samples: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(message("model", "a torch.nn.Module", type(model).__name__))
        shapes = shapes_of(fim)
        there = {name: parameter.shape for name, parameter in model.named_parameters()}
        advice = f"It was made for {fim.provenance.model or 'another model'}; select parameters when making it."
        self.model = model
        self._given = matched_shapes(shapes, there, fim.provenance.tied, "fim", RESULT, advice)
        self._fim = fim
        self._check_result()
        self.samples = _samples(fim, samples)
        self.likelihood = _likelihood(fim, likelihood)
        self.curvature: Curvature = curvature_of(fim, self.samples)
        self.prior_precision = self._prior(prior_precision)

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self._means.values())
        values = sorted(set(self.prior_precision.values()))
        prior = f"{values[0]:.4g}" + ("" if len(values) == 1 else f" to {values[-1]:.4g}")
        return f"{type(self).__name__}({size:,} parameters, {self.samples:,} samples, prior precision {prior})"

    def sample(self, seed: int = 0) -> dict[str, Tensor]:
        """Return one draw of the parameters, by the model's names; `torch.func.functional_call` evaluates it."""
        means = self._means
        generator = torch.Generator(next(iter(means.values())).device).manual_seed(random_seed(seed))
        return self._draw(means, generator)

    def predict(
        self, data: Iterable[object], method: Method = "probit", samples: int = 100, seed: int = 0, **reading: Any
    ) -> Prediction:
        """Return mean and variance of y for all outputs in the data that count, averaged over the posterior.

        "probit" and "linearised" take a backward pass for each output of the network, and logits of shape [B, C];
        "sampled" takes `samples` forward passes, for outputs of any shape.  `samples` and `seed` are those of
        "linearised" (draws of the outputs) and "sampled" (draws of the parameters, the same for all batches).
        For Gaussian targets, "probit" and "linearised" are the same and exact.  `reading`: the arguments of
        `nm.fisher_diagonal` that say how data and outputs are read, such as `class_dim`.
        """
        one_of(method, "method", "probit", "linearised", "sampled")
        samples, seed = integer_in_range(samples, "samples", 1, 10**9, "draws"), random_seed(seed)
        check_weights(self._fim.provenance, self.model, "fim")
        if method == "sampled":
            found = list(self._sampled(data, samples, seed, reading))
        else:
            found = list(self._linearised(data, samples if method == "linearised" else 0, seed, reading))
        if not found:
            raise ValueError(message("data", "an iterable with at least one batch", "none"))
        return Prediction(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def log_marginal_likelihood(self, data: Iterable[object], **reading: Any) -> float:
        """Return log p(data) ≈ log p(data | θ̂) + log N(θ̂; 0, δ⁻¹) + ½ log det(2π P⁻¹), for the training data.

        The data are those that N counts, with labels; an error says if their number is another one.
        """
        check_weights(self._fim.provenance, self.model, "fim")
        problem, total, samples = self._problem(data, reading), 0.0, 0
        with problem.session():
            for batch in problem.batches():
                outputs = problem.outputs(batch)
                if outputs.labels is None:
                    raise ValueError(message("data", "batches with labels", f"none in batch {batch.number}"))
                core, labels = problem.distributions(outputs, compact=True)
                assert labels is not None
                total += float(log_likelihood(core, labels).double().sum())
                samples += int(outputs.samples)
        if samples != self.samples:
            advice = "The evidence is that of all training data; `samples=` of nm.Laplace says how many there are."
            raise ValueError(message("data", f"the {self.samples} training samples", f"{samples} samples", advice))
        return total + self._log_occam_factor()

    def optimize_prior_precision(self, scope: Literal["model", "tensor"] = "model") -> Self:
        """Return the posterior with the prior precision of most evidence: one δ for the model, or one for each tensor.

        A weight and a bias in one Kronecker block count as one tensor.

        δ‖θ̂‖² = Σ_i h_i/(h_i + δ) with h the eigenvalues of N F: the left side increases with δ and the right side
        decreases, so that there is one solution, and it is the maximum.  No pass over the data is needed.
        """
        one_of(scope, "scope", "model", "tensor")
        check_weights(self._fim.provenance, self.model, "fim")
        blocks, found = list(self.curvature.blocks), dict[str, float]()
        for group in [blocks] if scope == "model" else [[block] for block in blocks]:
            names = [name for block in group for name in block]
            values = [self.curvature.eigenvalues(block).double().flatten() for block in group]
            norm = sum(float(self._means[name].detach().double().square().sum()) for name in names)
            found |= dict.fromkeys(names, _best_precision(values, norm, names))
        tuned = copy.copy(self)
        tuned.prior_precision = found
        return tuned

    @property
    def _means(self) -> dict[str, nn.Parameter]:
        """The parameters of the model by the result's names."""
        named = dict(self.model.named_parameters())
        return {name: named[given] for name, given in self._given.items()}

    def _precisions(self, block: Block) -> Tensor:
        """The eigenvalues of P for one block."""
        return self.curvature.eigenvalues(block) + self.prior_precision[block[0]]

    def _draw(self, means: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """One draw of the parameters, by the model's names: θ̂ + Q (N Λ + δ)^-½ ε for N F = Q N Λ Qᵀ."""
        drawn = {}
        for block in self.curvature.blocks:
            given = self._precisions(block)
            precision = given.to(generator.device)
            noise = torch.randn(precision.shape, generator=generator, dtype=precision.dtype, device=generator.device)
            steps = self.curvature.rotate_back(block, (noise * precision.rsqrt()).to(given.device)[None])
            for name, step in zip(block, steps, strict=True):
                mean = means[name].detach()
                drawn[self._given[name]] = (mean + step[0].to(mean.device)).to(mean.dtype)
        return drawn

    def _sampled(
        self, data: Iterable[object], samples: int, seed: int, reading: dict[str, Any]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        problem, means = self._problem(data, reading), self._means
        model, generator = WithParameters(problem.model), torch.Generator(problem.device)
        with problem.session(), torch.no_grad():
            for batch in problem.batches():
                moments = []
                for number in range(samples):
                    generator.manual_seed(batch_seed(seed, number))
                    drawn = {f"model.{name}": value for name, value in self._draw(means, generator).items()}
                    outputs = functional_call(model, drawn, (lambda batch=batch: problem.evaluate(batch),))
                    moments.append(_moments(self.likelihood(_rows(outputs))))
                each, variances = (torch.stack(parts) for parts in zip(*moments, strict=True))  # [s, n, C]
                yield each.mean(0), variances.mean(0) + each.var(0, correction=0)

    def _linearised(
        self, data: Iterable[object], samples: int, seed: int, reading: dict[str, Any]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        problem = self._problem(data, reading)
        items = [unlabelled(item, problem.label_key) for item in data]
        problem = self._problem(items, reading)
        with problem.session():
            logits = [problem.outputs(batch).logits for batch in problem.batches()]
        for one in logits:
            if one.ndim != 2:
                advice = "Use method='sampled', which takes outputs of any shape."
                raise ValueError(
                    message("logits", "of shape [B, C], one output a sample", f"{list(one.shape)}", advice)
                )
        held = {parameter: name for name, parameter in self._means.items()}
        names = {name: held[parameter] for name, parameter in problem.parameters.items()}

        def root(block: Block, values: Sequence[Tensor]) -> Tensor:
            rotated = self.curvature.rotate(block, values)
            return rotated * self._precisions(block).to(rotated).rsqrt()

        of_model = {name: other for other, name in names.items()}
        blocks = {block: [of_model[name] for name in block] for block in self.curvature.blocks}
        covariances = output_covariances(problem, root, blocks, full=samples > 0)
        for number, (z, covariance) in enumerate(zip(logits, covariances, strict=True)):
            z = z.to(torch.float64 if z.dtype == torch.float64 else torch.float32)
            if covariance is None:
                covariance = z.new_zeros(*z.shape, *z.shape[1:][: samples > 0])
            generator = torch.Generator(z.device).manual_seed(batch_seed(seed, number))
            yield self._average(z, covariance.to(z), samples, generator)

    def _average(
        self, z: Tensor, covariance: Tensor, samples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of y for outputs N(z, covariance), by draws of the outputs or without (`samples` is 0)."""
        diagonal = covariance.diagonal(dim1=-2, dim2=-1) if samples else covariance
        core = self.likelihood(z)
        if isinstance(core, Gaussian):
            return core.mean, core.variance + diagonal
        if not samples:
            return _moments(self.likelihood(z / (1 + math.pi / 8 * diagonal).sqrt()))
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt()[:, None]  # [n, C, C]
        mean = torch.zeros_like(z)
        for _ in range(samples):
            noise = torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
            mean += _moments(self.likelihood(z + (root @ noise[..., None])[..., 0]))[0] / samples
        return mean, mean * (1 - mean)

    def _log_occam_factor(self) -> float:
        """½ Σ (log δ - log(h + δ)) - ½ δ ‖θ̂‖²: the factors of 2π cancel."""
        total = 0.0
        for block in self.curvature.blocks:
            prior = self.prior_precision[block[0]]
            total -= 0.5 * float((self.curvature.eigenvalues(block).double() / prior).log1p().sum())
        for name, mean in self._means.items():
            total -= 0.5 * self.prior_precision[name] * float(mean.detach().double().square().sum())
        return total

    def _problem(self, data: Iterable[object], reading: dict[str, Any]) -> Problem:
        chosen = {id(parameter) for parameter in self._means.values()}
        problem = Problem.of(self.model, data, self.likelihood, lambda _, parameter: id(parameter) in chosen, **reading)
        if len(problem.parameters) != len(chosen):
            got = f"{len(chosen) - len(problem.parameters)} frozen ones"
            raise ValueError(message("model", "one whose parameters in the result are trainable", got))
        return problem

    def _prior(self, given: float | Mapping[str, float]) -> dict[str, float]:
        """Check the precisions, and give one to each tensor of the result."""
        advice = "It is the weight decay on the summed loss, N times that on the mean loss."
        if not isinstance(given, Mapping):
            return dict.fromkeys(self._given, finite_number(given, "prior_precision", positive=True, advice=advice))
        if given.keys() != self._given.keys():
            got = f"{len(given)} names; the first that differ: {sorted(given.keys() ^ self._given.keys())[:3]}"
            raise ValueError(message("prior_precision", f"a number for each of {len(self._given)} tensors", got))
        found = {
            name: finite_number(given[name], f"prior_precision[{name!r}]", positive=True, advice=advice)
            for name in self._given
        }
        for block in self.curvature.blocks:
            if len({found[name] for name in block}) > 1:
                got = f"{[found[name] for name in block]} for {' and '.join(block)}"
                raise ValueError(message("prior_precision", "the same for all tensors of a Kronecker block", got))
        return found

    def _check_result(self) -> None:
        """Refuse what is no sum over samples of a Fisher information at the model's parameters."""
        p = self._fim.provenance
        if p.scale != 1:
            advice = "Pass the result itself in any view (.mean, .sum): the sum over samples is taken from it."
            raise ValueError(message("fim", "a result that was not scaled", f"one multiplied by {p.scale:g}", advice))
        if p.target.startswith("not a Fisher"):
            raise ValueError(message("fim", "a Fisher information", f"{p.estimator}: {p.target}"))
        check_weights(self._fim.provenance, self.model, "fim")


def log_likelihood(core: Core, labels: Tensor) -> Tensor:
    """Return log p(y) for each distribution [R], of labels [R] or targets [R, C]."""
    if isinstance(core, Categorical):
        return -cross_entropy(core.logits, labels, reduction="none")
    if isinstance(core, Bernoulli):
        return -binary_cross_entropy_with_logits(core.logits, labels.to(core.dtype), reduction="none").sum(-1)
    if isinstance(core, Gaussian):
        squares = (labels.to(core.dtype) - core.mean).square() / core.variance
        return -0.5 * (squares + (2 * math.pi * core.variance).log()).sum(-1)
    raise TypeError(message("likelihood", "one to Categorical, Bernoulli or Gaussian", f"to {type(core).__name__}"))


def _moments(core: Core) -> tuple[Tensor, Tensor]:
    """Mean and variance of y, entry by entry."""
    if isinstance(core, Gaussian):
        return core.mean, core.variance
    if isinstance(core, (Categorical, Bernoulli)):
        return core.probs, core.probs * core.complement
    raise TypeError(message("likelihood", "one to Categorical, Bernoulli or Gaussian", f"to {type(core).__name__}"))


def _rows(outputs: Outputs) -> Tensor:
    """All samples of logits [B, C]; of others the positions that count."""
    return outputs.logits if outputs.logits.ndim == 2 else outputs.select(outputs.logits)


def _samples(fim: DiagonalFisher | KroneckerFisher, samples: int | None) -> int:
    """The number of training samples: the result's, unless those are counted along a path of training."""
    if samples is not None:
        return integer_in_range(samples, "samples", 1, 2**62, "training samples")
    if "moving average" in fim.provenance.target:
        advice = "It has counted the samples of all steps, so its count is not that of the training data."
        raise ValueError(message("samples", "given for a moving average", "None", advice))
    return fim.count


def _likelihood(fim: DiagonalFisher | KroneckerFisher, given: Likelihood | None) -> Likelihood:
    """The likelihood that the result was made with."""
    name = fim.provenance.likelihood
    if given is None:
        if name not in _KNOWN:
            raise ValueError(message("likelihood", f"the one that the result was made with, {name}", "None"))
        return _KNOWN[name]
    if not callable(given):
        raise TypeError(message("likelihood", "a function from outputs to a core", repr(given)))
    mine = getattr(given, "__name__", repr(given))
    if mine != name:
        raise ValueError(message("likelihood", f"the one that the result was made with, {name}", mine))
    return given


def _best_precision(eigenvalues: list[Tensor], squared_norm: float, names: list[str]) -> float:
    """The root δ of δ‖θ̂‖² = Σ h/(h + δ), by bisection of its logarithm."""
    count = sum(int((h > 0).sum()) for h in eigenvalues)
    if not squared_norm or not count:
        what = "parameters that are all zero" if count else "a Fisher information of zero"
        got = f"{what} in {', '.join(names[:3])}"
        advice = "Its evidence has no maximum there: use scope='model', or leave the tensor out with fim.filter."
        raise ValueError(message("fim", "such that each prior precision has a maximum of evidence", got, advice))

    def excess(delta: float) -> float:
        return delta * squared_norm - sum(float((h / (h + delta)).sum()) for h in eigenvalues)

    high = low = count / squared_norm  # where the excess is positive, or zero
    while excess(low) > 0:
        high, low = low, low / 16
    while high > low * (1 + 1e-9):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return math.sqrt(low * high)
