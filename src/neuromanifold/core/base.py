"""What every core space offers: the interface that estimators are written against."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from neuromanifold.core import checks
from neuromanifold.core.spectrum import Spectrum


class Core(ABC):
    """A batch of distributions p(y | z) at a network's outputs z [..., C], with their Fisher information M(z).

    The network's metric is F(θ) = Σ_x Jᵀ M(z(x)) J with J = ∂z/∂θ, so all that depends on the likelihood is here, in C
    dimensions, and none of it knows of a network.  `Categorical`, `Bernoulli` and `Gaussian` are cores.  All methods
    accept any leading shape, run on the device of z, keep float32 and float64, and evaluate half precisions in
    float32.  They are differentiable in z wherever the quantity is.

    Args:
        outputs: the network's outputs z [..., C]; their meaning is that of the subclass.

    Example:
        >>> core: nm.Core = nm.Categorical(model(inputs))
        >>> core.batch_shape, core.fisher().shape
        (torch.Size([32]), torch.Size([32, 3, 3]))
        >>> v = torch.randn(32, 3)
        >>> torch.allclose(core.matvec(v), core.factor(core.factor_transpose(v)), atol=1e-6)
        True
    """

    def __init__(self, outputs: Tensor) -> None:
        self.batch_shape: torch.Size = outputs.shape[:-1]
        self.dim: int = outputs.shape[-1]
        self.dtype: torch.dtype = outputs.dtype
        self.device: torch.device = outputs.device

    def __repr__(self) -> str:
        shape, dtype = list(self.batch_shape), str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}(batch_shape={shape}, dim={self.dim}, dtype={dtype}, device={self.device})"

    @abstractmethod
    def fisher(self) -> Tensor:
        """The metric M = E[s sᵀ] with s the score, dense [..., C, C].  O(C²)."""

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """M v for v [..., C].  O(C)."""

    @abstractmethod
    def factor(self, xi: Tensor) -> Tensor:
        """S ξ for ξ [..., C], where S Sᵀ = M: a cotangent with E[(Sξ)(Sξ)ᵀ] = M for white noise ξ.  O(C)."""

    @abstractmethod
    def factor_transpose(self, v: Tensor) -> Tensor:
        """Sᵀ v for v [..., C].  O(C)."""

    @abstractmethod
    def factor_matrix(self) -> Tensor:
        """S itself, dense [..., C, C].  O(C²)."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """How many columns a factor of M needs."""

    @abstractmethod
    def column(self, i: int) -> Tensor:
        """The i-th column [..., C] of a factor of M that has only `rank` columns.  O(C)."""

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns `start` to `stop - 1` of that factor at once, [k, ..., C].  O(kC)."""
        return torch.stack([self.column(i) for i in range(*self._range(start, stop))])

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None, shape: tuple[int, ...] = ()) -> Tensor:
        """Draw y ~ p(y | z) with a local generator, `shape` independent times for each member of the batch."""

    @abstractmethod
    def score(self, y: Tensor) -> Tensor:
        """∂ log p(y | z) / ∂z, [..., C].  O(C)."""

    @abstractmethod
    def trace(self) -> Tensor:
        """The trace tr M of each distribution, [...].  O(C)."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """‖M‖² = tr M² = Σ λ_i², [...].  O(C)."""

    @abstractmethod
    def spectrum(self, k: int) -> Spectrum:
        """The k largest eigenvalues [..., k], descending, and their orthonormal eigenvectors [..., k, C]."""

    @abstractmethod
    def upper_envelope(self) -> Tensor:
        """The diagonal ζ [..., C] of a matrix above M (Löwner order) with no other in between (Lemma 2).  O(C)."""

    def lower_envelope(self, rank: int = 1) -> Spectrum:
        """Σ λ_i v_i v_iᵀ over the top `rank`: below M, and no other of its rank in between (Lemma 2).  O(rank·C).

        It is also the nearest matrix of its rank, in every unitarily invariant norm.  Where the eigenvalue number
        `rank` is tied with the next, a choice is made.
        """
        return self.spectrum(self._rank(rank, "rank"))

    def empirical_fisher(self, y: Tensor) -> Tensor:
        """R(y) = s(y) s(y)ᵀ, [..., C, C]: unbiased for M if y is drawn from p(y | z), biased if y is given.  O(C²)."""
        score = self.score(y)
        return score[..., :, None] * score[..., None, :]

    def _vector(self, v: Tensor, argument: str) -> Tensor:
        return checks.same_last_dimension(v, argument, self.batch_shape, self.dim)

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        start = checks.integer_in_range(start, "start", 0, self.rank - 1, f"the rank is {self.rank}")
        why = f"at least one column, and the rank is {self.rank}"
        return start, checks.integer_in_range(stop, "stop", start + 1, self.rank, why)

    def _rank(self, k: int, argument: str = "k") -> int:
        return checks.integer_in_range(k, argument, 1, self.dim, f"the dimension is {self.dim}")
