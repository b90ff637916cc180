"""The statistical simplex Δ: one label out of C classes, p = softmax(z).  Section 2 of the paper."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from neuromanifold.core import checks, empirical, envelopes, spectrum
from neuromanifold.core.base import Core
from neuromanifold.core.eigenvalue_bounds import EigenvalueBounds, EigenvalueBoundTerms, bound_terms
from neuromanifold.core.empirical import EmpiricalError, ScoreVariance
from neuromanifold.core.envelopes import EnvelopeErrors
from neuromanifold.core.spectrum import Spectrum
from neuromanifold.core.sums import is_differentiated, square_root, sum_of_others

_LARGE, _PART = 2**27, 2**24  # numbers of which no copies are made; and that are worked on at a time


class Categorical(Core):
    """Categorical distributions at logits [..., C], with metric M = diag(p) - p pᵀ (equation 3 of the paper).

    M is a graph Laplacian with weights p_i p_j: the vector e of ones spans its kernel, and each row sums to zero.
    Where the usual formula would cancel, in the row of the most likely class, the methods below sum the other rows
    instead, so that results have a small relative error even for a saturated network with p = 1 - 1e-30.  Each method
    states its cost; nothing is computed before it is asked for, so do not overwrite the logits until then.

    Args:
        logits: real numbers [..., C] with C >= 2; -inf is a class that cannot occur.
        validate: search for NaN, +inf and labels that are no class, which on a GPU waits for the device.

    Raises:
        TypeError, ValueError: `logits` is not a floating-point tensor of such a shape, or not valid.

    Example:
        >>> core = nm.Categorical(torch.tensor([2.0, 0.0, -1.0]))
        >>> core.fisher()
        tensor([[ 0.1318, -0.0964, -0.0354],
                [-0.0964,  0.1012, -0.0048],
                [-0.0354, -0.0048,  0.0402]])
        >>> core.spectrum(1).values, core.largest_eigenvalue()
        (tensor([0.2173]), tensor(0.2173))
    """

    def __init__(self, logits: Tensor, *, validate: bool = True) -> None:
        logits = checks.real_vectors(logits, "logits", least=2, noun="classes")
        super().__init__(logits)
        self._validates = validate
        self.dtype = checks.promoted(logits.dtype)
        self.given = logits  # in the precision that they came in
        if validate and logits.numel() and not logits.is_meta and not _all_finite(logits.detach().amax(-1)):
            raise ValueError(_what_is_wrong(logits))
        if is_differentiated(logits):  # differentiable also if they are first read under torch.no_grad()
            self.logits = logits.to(self.dtype)
            self.probs = _softmax(self.logits)

    @cached_property
    def logits(self) -> Tensor:
        """z [..., C], in single or double precision."""
        with torch.inference_mode(False), torch.no_grad():
            return self.given.to(self.dtype)

    @cached_property
    def probs(self) -> Tensor:
        """p = softmax(z), [..., C]."""
        with torch.inference_mode(False), torch.no_grad():
            return _softmax(self.given.to(self.dtype))

    @property
    def complement(self) -> Tensor:
        """1 - p, accurate relatively also where p is nearly one: [..., C].  O(C)."""
        return sum_of_others(self.probs)

    def fisher(self) -> Tensor:
        """F = diag(p) - p pᵀ, dense [..., C, C] (Eq. 3).  O(C²)."""
        p = self.probs
        return torch.diag_embed(p * self.complement) + _off_diagonal(-p[..., :, None] * p[..., None, :])

    def matvec(self, v: Tensor) -> Tensor:
        """F v = p∘(v - pᵀv) for v [..., C].  O(C)."""
        return self.probs * self._centred(self._vector(v, "v"))

    def factor(self, xi: Tensor) -> Tensor:
        """S ξ = √p∘ξ - p(√p·ξ) for ξ [..., C], where S = diag(√p) - p√pᵀ and S Sᵀ = F.  O(C).

        It is the gradient in z of 2 Σ_y √p_y ξ_y, which appendix B of the paper proposes as an alternative: the same.
        """
        xi = self._vector(xi, "xi")
        scaled = square_root(self.probs) * xi
        out = scaled - self.probs * scaled.sum(-1, keepdim=True)
        likely = self.probs.argmax(-1, keepdim=True).expand((*out.shape[:-1], 1))
        out = out.scatter(-1, likely, 0.0)
        return out.scatter(-1, likely, -out.sum(-1, keepdim=True))  # the entries sum to zero

    def factor_transpose(self, v: Tensor) -> Tensor:
        """Sᵀ v = √p∘(v - pᵀv) for v [..., C].  O(C)."""
        return square_root(self.probs) * self._centred(self._vector(v, "v"))

    def factor_matrix(self) -> Tensor:
        """S = diag(√p) - p√pᵀ, dense [..., C, C].  O(C²)."""
        p, root = self.probs, square_root(self.probs)
        return torch.diag_embed(root * self.complement) + _off_diagonal(-p[..., :, None] * root[..., None, :])

    @property
    def rank(self) -> int:
        """C - 1: S√p = 0, so S Q with an orthonormal basis Q of √p's complement is a factor too."""
        return self.dim - 1

    def column(self, i: int) -> Tensor:
        """Column i of S Q, 0 <= i < C-1, with Q from the reflection that maps √p to e_m, m the likeliest class.  O(C).

        It is √p_j (e_j - p) - √p_j √p_m/(1 + √p_m) (e_m - p), with j the class number i when m is left out.
        That is √p_j (e_j - w), with w = p/(1 + √p_m) except for w_m = √p_m: nothing cancels, since p_j <= 1/2.
        """
        i = checks.integer_in_range(i, "i", 0, self.dim - 2, f"the rank is {self.dim - 1}")
        return self._columns(i, i + 1)[0]

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns `start` to `stop - 1` of S Q at once, [k, ..., C].  O(kC)."""
        return self._columns(*self._range(start, stop))

    def _columns(self, start: int, stop: int) -> Tensor:
        p = self.probs
        m = p.argmax(-1, keepdim=True)  # [..., 1]
        root_m = p.gather(-1, m).sqrt()
        w = (p / (1 + root_m)).scatter_(-1, m, root_m)
        i = torch.arange(start, stop, device=self.device).view(-1, *[1] * m.ndim)
        j = i + (m <= i)  # [k, ..., 1]
        root_j = square_root(self._at(p, j))
        return (-root_j * w).scatter_(-1, j, root_j * (1 - self._at(w, j)))

    def sample(self, generator: torch.Generator | None = None, shape: tuple[int, ...] = ()) -> Tensor:
        """Labels y ~ p(y | z) as int64, `shape` in front of the batch.  O(C) each."""
        count = checks.sample_shape(generator, shape).numel()
        with torch.no_grad():
            flat = self.probs.double().reshape(-1, self.dim)  # float32 would never draw the rarest of many classes
            if not flat.shape[0] or not count:
                return torch.zeros(*shape, *self.batch_shape, dtype=torch.int64, device=self.device)
            labels = torch.multinomial(flat, count, replacement=True, generator=generator)
        return labels.mT.reshape(*shape, *self.batch_shape)

    def score(self, y: Tensor) -> Tensor:
        """e_y - p for labels y [...], as [..., C].  O(C)."""
        y = self._labels(y)[..., None]
        return (-self.probs).expand((*y.shape[:-1], self.dim)).scatter(-1, y, self._at(self.complement, y))

    def rank_two_fisher(self, y: Tensor) -> Tensor:
        """R'(y) = e_y e_yᵀ - p pᵀ, [..., C, C]: unbiased like R(y), and random on the diagonal alone.  O(C²)."""
        y = self._labels(y)
        return torch.diag_embed(torch.nn.functional.one_hot(y, self.dim).to(self.dtype)) - (
            self.probs[..., :, None] * self.probs[..., None, :]
        )

    def trace(self) -> Tensor:
        """tr F = 1 - ‖p‖² (Theorem 1), [...].  O(C)."""
        if (parts := self._parts()) is not None:
            return torch.cat([part.trace() for part in parts]).view(self.batch_shape)
        return (self.probs * self.complement).sum(-1)

    def squared_norm(self) -> Tensor:
        """‖F‖² = Σ p_i²(1 - 2p_i) + ‖p‖⁴, [...]: by p_i² (1 - p_i)² on the diagonal and p_i² p_j² elsewhere.  O(C)."""
        if (parts := self._parts()) is not None:
            return torch.cat([part.squared_norm() for part in parts]).view(self.batch_shape)
        squares = self.probs.square()
        return (squares * (self.complement.square() + sum_of_others(squares))).sum(-1)

    def null_vector(self) -> Tensor:
        """v_1 = e/√C with λ_1 = 0 (Theorem 1): adding a constant to all logits changes nothing.  [..., C]."""
        return torch.full_like(self.probs, self.dim**-0.5)

    def spectrum(self, k: int) -> Spectrum:
        """The top k eigenpairs (Theorem 1's λ_C, v_C and on), 1 <= k <= C, by the secular equation.  O(kC).

        See `neuromanifold.core.spectrum` for how.  k = C adds the kernel (0, e/√C).  An eigenvalue is accurate
        relatively, however small, as long as it is a normal number; an eigenvector is accurate in each of its digits.
        First and second derivatives are right wherever they exist.
        """
        k = self._rank(k)
        shape = self.batch_shape
        inner = min(k, self.dim - 1)
        values, vectors = spectrum.eigenpairs(self.probs.reshape(-1, self.dim), inner)
        values, vectors = values.reshape(*shape, inner), vectors.reshape(*shape, inner, self.dim)
        if k > inner:
            values = torch.cat([values, torch.zeros_like(values[..., :1])], dim=-1)
            vectors = torch.cat([vectors, self.null_vector()[..., None, :]], dim=-2)
        return Spectrum(values, vectors)

    def largest_eigenvalue(self) -> Tensor:
        """λ_C of Theorem 1, exact, [...].  O(C)."""
        return spectrum.eigenvalues(self.probs.reshape(-1, self.dim), 1).reshape(self.batch_shape)

    def largest_eigenvalue_bounds(self) -> EigenvalueBounds:
        """Theorem 1: (lower, upper) around λ_C, [...] each.  O(C)."""
        return self.largest_eigenvalue_bound_terms().bounds()

    def largest_eigenvalue_bound_terms(self) -> EigenvalueBoundTerms:
        """Theorem 1: all three lower and all three upper bounds of λ_C by name, [...] each.  O(C)."""
        return bound_terms(self.probs)

    def upper_envelope(self) -> Tensor:
        """Lemma 2: diag(p) as its diagonal p [..., C]; no other diagonal matrix lies between F and it.  O(1).

        Between means the Löwner order, and p must have no zeros.  Diagonal matrices above F that are neither larger nor
        smaller than diag(p) do exist, such as λ_C I.
        """
        return self.probs

    def envelope_errors(self, rank: int = 1) -> EnvelopeErrors:
        """Lemma 3 (corrected): errors of both envelopes in Frobenius norm, exact and bounded.  O(rank·C) and a sort."""
        k = self._rank(rank, "rank")
        errors = envelopes.envelope_errors(self.probs.reshape(-1, self.dim), k)
        return EnvelopeErrors(*(error.reshape(self.batch_shape) for error in errors))

    def empirical_error(self, y: Tensor) -> Tensor:
        """‖R(y) - F‖ for given labels y, exact, [...].  O(C)."""
        return empirical.empirical_error(self.probs, self._labels(y))

    def empirical_error_bound(self) -> EmpiricalError:
        """Lemma 4: the worst label, its exact ‖R(y) - F‖, and both lower bounds of it.  O(C)."""
        return empirical.worst_label(self.probs, self.largest_eigenvalue())

    def score_variance(self) -> ScoreVariance:
        """The lemma of appendix A: Var(R_ij), its coefficient of variation, and Var(R'_ii).  O(C²)."""
        return empirical.categorical_score_variance(self.probs)

    def _parts(self) -> list[Categorical] | None:
        """Some rows at a time, if p is not there yet and so large that it should not be; None otherwise."""
        if self.given.numel() <= _LARGE or "probs" in self.__dict__:
            return None
        rows = self.given.reshape(-1, self.dim)
        return [Categorical(part, validate=False) for part in torch.split(rows, max(1, _PART // self.dim))]

    def _centred(self, v: Tensor) -> Tensor:
        """v - pᵀv, with v first shifted to 0 at the most likely class: F e = 0 allows it, and nothing cancels."""
        likely = self.probs.argmax(-1, keepdim=True)
        v = v - self._at(v, likely)
        return v - (self.probs * v).sum(-1, keepdim=True)

    @staticmethod
    def _at(values: Tensor, index: Tensor) -> Tensor:
        """values [..., C] at index [..., 1], the leading dimensions broadcast against each other."""
        leading = checks.broadcast(values.shape[:-1], index.shape[:-1])
        return values.expand(leading + values.shape[-1:]).gather(-1, index.expand((*leading, 1)))

    def _labels(self, y: Tensor) -> Tensor:
        """Check labels [...]: integers in 0..C-1 whose shape ends with the batch shape."""
        if not isinstance(y, Tensor) or y.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            got = str(y.dtype) if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(checks.message("y", "an integer tensor of class labels", got))
        if y.shape[y.ndim - len(self.batch_shape) :] != self.batch_shape:
            expected = f"of shape {list(self.batch_shape)}, or with extra leading dimensions"
            raise ValueError(checks.message("y", expected, f"shape {list(y.shape)}"))
        y = y.to(device=self.device, dtype=torch.int64)
        if self._validates and y.numel() and not 0 <= int(y.min()) <= int(y.max()) < self.dim:
            got = f"labels from {int(y.min())} to {int(y.max())}"
            advice = "Drop ignored positions (such as -100) first."
            raise ValueError(checks.message("y", f"between 0 and {self.dim - 1}", got, advice))
        return y


def _softmax(logits: Tensor) -> Tensor:
    probs = logits.softmax(-1)
    return probs / probs.sum(-1, keepdim=True)  # softmax in float32 is 1e-4 off for 150,000 classes


def _off_diagonal(matrix: Tensor) -> Tensor:
    return matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def _all_finite(values: Tensor) -> bool:
    low, high = values.aminmax()
    return math.isfinite(low) and math.isfinite(high)  # NaN is passed on


def _what_is_wrong(logits: Tensor) -> str:
    """Name the first bad row: NaN, +inf, or all classes impossible."""
    bad = ~torch.isfinite(logits.amax(-1))
    where = bad.nonzero()[0].tolist()
    row = logits[tuple(where)]
    got = "NaN" if bool(row.isnan().any()) else "+inf" if bool((row == torch.inf).any()) else "-inf for every class"
    place = f"{got} at index {where}" if where else got
    advice = f"{int(bad.sum())} of {bad.numel()} rows are affected; look for overflow in half precision or a bad input."
    return checks.message("logits", "free of NaN and +inf, with a possible class in each row", place, advice)
