"""Trace, diagonal and log-determinant of a matrix that is only known by its products, from random vectors."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.checks import integer_in_range, one_of, warn
from neuromanifold.operators.krylov import Product, orthonormal, times

Method = Literal["hutchinson", "hutch++"]  # of the diagonal and the trace; "xtrace" and "xdiag" for one of them


class Estimate(NamedTuple):
    """A number or a vector, and its standard error from the spread of the probes."""

    value: Tensor
    stderr: Tensor

    def __float__(self) -> float:
        return float(self.value)


def check_method(method: str, products: int) -> int:
    """The number of products, if the method is known and they are enough for it."""
    least = 2 if one_of(method, "method", "hutchinson", "hutch++") == "hutchinson" else 4
    return integer_in_range(products, "products", least, 10**9, f"{method} takes at least {least}")


def stochastic_diagonal(
    product: Product, like: Tensor, method: str, products: int, seed: int
) -> tuple[Estimate, Estimate]:
    """Estimates of diag F [P] and of tr F, from `products` products with columns like `like` [P, 1].

    Hutchinson: the mean of ξ∘Fξ over random signs ξ.  Hutch++ (Meyer et al. 2021): with Q an orthonormal basis of F S
    for a block S of random signs, and R = I - QQᵀ,

        F = QQᵀF + FQQᵀ - QQᵀFQQᵀ + RFR,

    the first three exactly and the last by Hutchinson: two thirds of the products take out the leading eigenvectors.
    """
    generator = torch.Generator(like.device).manual_seed(seed)
    sketch = products // 3 if method == "hutch++" else 0
    exact = torch.zeros_like(like[:, 0])
    basis = exact.new_zeros(len(like), 0)
    if sketch:
        basis = orthonormal(product(sign_columns(like, sketch, generator)))
        images = product(basis) if basis.shape[1] else basis
        exact = (2 * basis * images - basis * times(basis, times(basis.mT, images))).sum(1)
    probes = products - 2 * sketch
    signs = sign_columns(like, probes, generator)
    rest = product(signs - times(basis, times(basis.mT, signs)))
    samples = signs * (rest - times(basis, times(basis.mT, rest)))  # [P, probes]
    return _estimate(samples, exact), _estimate(samples.sum(0), exact.sum())


def stochastic_trace(product: Product, like: Tensor, products: int, seed: int) -> Estimate:
    """XTrace (Epperly, Tropp and Webber 2024): tr F from k = `products`/2 random signs, each used in both roles.

    With Y = F Ω and Q an orthonormal basis of it, leaving out ω_i leaves the space Q_i = Q (I - s_i s_iᵀ), where s_i is
    column i of R⁻ᵀ, normalised, and Y = Q R.  The mean over i, of which each is unbiased, of

        tr Q_iᵀ F Q_i + w_iᵀ F w_i,        w_i = (I - Q_i Q_iᵀ) ω_i

    takes out k - 1 eigenvectors with k + k products.
    """
    signs, images, basis, left_out = _sketch(product, like, products // 2, seed)
    inside = basis.mT @ product(basis.to(like)).double()  # Qᵀ F Q
    trace = inside.diagonal().sum()
    if left_out is None:
        return Estimate(trace, torch.zeros_like(trace))
    parts = basis.mT @ signs
    parts = parts - left_out * (left_out * parts).sum(0)  # Qᵀ Q_i Q_iᵀ ω_i
    rest = (signs * images).sum(0) - 2 * (parts * (basis.mT @ images)).sum(0) + (parts * (inside @ parts)).sum(0)
    return _estimate(trace - (left_out * (inside @ left_out)).sum(0) + rest, torch.zeros_like(trace))


def exchangeable_diagonal(product: Product, like: Tensor, products: int, seed: int) -> Estimate:
    """XDiag (Epperly, Tropp and Webber 2024): diag F from k = `products`/2 random signs, each used in both roles.

    As in `stochastic_trace`; the mean over i, of which each is unbiased as ω_i is independent of Q_i, of

        diag(Q_i Q_iᵀ F) + ω_i ∘ (I - Q_i Q_iᵀ) F ω_i
    """
    signs, images, basis, left_out = _sketch(product, like, products // 2, seed)
    rows = product(basis.to(like)).double()  # F Q
    exact = (basis * rows).sum(1)
    if left_out is None:
        return Estimate(exact, torch.zeros_like(exact))
    along = basis.mT @ images
    rest = images - basis @ (along - left_out * (left_out * along).sum(0))  # (I - Q_i Q_iᵀ) F ω_i
    return _estimate(signs * rest - (basis @ left_out) * (rows @ left_out), exact)


def _sketch(product: Product, like: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return random signs Ω [P, k], F Ω = Q R, Q, and the s_i as columns, None where the range of F is exhausted."""
    signs = sign_columns(like, k, torch.Generator(like.device).manual_seed(seed))
    images = product(signs)
    basis, triangle = (one.double() for one in torch.linalg.qr(images))
    sizes, left_out = triangle.diagonal().abs(), None
    if float(sizes.min()) > 10 * torch.finfo(like.dtype).eps * len(like) ** 0.5 * float(sizes.max()):
        eye = torch.eye(len(triangle), dtype=triangle.dtype, device=triangle.device)
        left_out = torch.linalg.solve_triangular(triangle.mT, eye, upper=False)
        left_out = left_out / torch.linalg.vector_norm(left_out, dim=0)
    return signs.double(), images.double(), basis, left_out


class SpectralDensity(NamedTuple):
    """The eigenvalues of F as a few values and how many eigenvalues each stands for, [probes, steps] each.

    The rows are those of single probes: Σ weights f(values)/probes is unbiased for tr f(F), for polynomials f up to the
    degree 2 steps - 1.
    """

    values: Tensor
    weights: Tensor

    def __call__(self, points: Tensor, width: float) -> Tensor:
        """Return the density at some points, the mean over probes, smoothed by Gaussians of a width."""
        distance = (points.to(self.values)[:, None] - self.values.flatten()) / width
        kernel = distance.square().mul(-0.5).exp() / (width * math.sqrt(2 * math.pi))
        return kernel @ self.weights.flatten() / len(self.values)


def spectral_density(product: Product, like: Tensor, probes: int, steps: int, seed: int) -> SpectralDensity:
    """Return nodes and weights of Lanczos quadrature from random signs: `steps` products for all probes at once.

    Each probe ξ gives a tridiagonal matrix, whose eigenvalues θ and first components τ of eigenvectors are the nodes
    and weights of P Σ τ² f(θ) ≈ ξᵀ f(F) ξ.
    """
    nodes, vectors = torch.linalg.eigh(_tridiagonal(product, like, probes, steps, seed))
    return SpectralDensity(nodes, len(like) * vectors[:, 0].square())


def stochastic_log_determinant(
    product: Product, like: Tensor, damping: float, probes: int, steps: int, seed: int
) -> Estimate:
    """log det(F + damping I) = tr log(F + damping I), by Lanczos quadrature from random signs (Ubaru et al. 2017).

    `steps` products for all probes at once, as for the spectral density.
    """
    nodes, weights = spectral_density(product, like, probes, steps, seed)
    warn_below_rounding(damping, float(nodes.max()), like.dtype)
    samples = (weights * (nodes.clamp(min=0) + damping).log()).sum(1)
    return _estimate(samples, torch.zeros((), dtype=torch.float64, device=like.device))


def _tridiagonal(product: Product, like: Tensor, probes: int, steps: int, seed: int) -> Tensor:
    """Return the tridiagonal matrices [probes, steps, steps] of Lanczos' iteration from random signs."""
    size = len(like)
    now = sign_columns(like, probes, torch.Generator(like.device).manual_seed(seed)) / math.sqrt(size)
    before, beta = torch.zeros_like(now), torch.zeros(probes, dtype=like.dtype, device=like.device)
    small = torch.zeros(probes, steps, steps, dtype=torch.float64, device=like.device)
    largest = torch.zeros(probes, dtype=like.dtype, device=like.device)
    for i in range(steps):
        image = product(now) - beta * before
        alpha = (now * image).sum(0)
        small[:, i, i] = alpha.double()
        image = image - alpha * now
        beta = torch.linalg.vector_norm(image, dim=0)
        largest = torch.maximum(largest, alpha.abs() + beta)
        ended = beta <= 10 * torch.finfo(like.dtype).eps * largest  # the space is exhausted
        beta = torch.where(ended, 0.0, beta)
        before, now = now, torch.where(ended, 0.0, image / torch.where(ended, 1.0, beta))
        if i + 1 < steps:
            small[:, i, i + 1] = small[:, i + 1, i] = beta.double()
    return small


def warn_below_rounding(damping: float, largest: float, dtype: torch.dtype) -> None:
    """Warn of a damping below eps λ_1: eigenvalues of that size are rounding, and would decide the result."""
    rounding = 10 * torch.finfo(dtype).eps * largest
    if 0 < damping < rounding:
        text = f"A damping of {damping:.2g} is less than rounding does to F, up to {rounding:.2g}. Use more damping"
        warn(text + (" or float64." if dtype != torch.float64 else "."))


def sign_columns(like: Tensor, columns: int, generator: torch.Generator) -> Tensor:
    """Random signs [P, columns] with even odds, drawn on the generator's device, as numbers like `like` [P, ...]."""
    shape, device = (len(like), columns), generator.device
    bits = torch.randint(0, 2, shape, generator=generator, device=device, dtype=torch.int8)
    return (2 * bits - 1).to(like)


def _estimate(samples: Tensor, exact: Tensor) -> Estimate:
    return Estimate(exact + samples.mean(-1), samples.std(-1) / math.sqrt(samples.shape[-1]))
