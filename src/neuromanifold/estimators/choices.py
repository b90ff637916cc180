"""The metric as a sum of columns in closed form, of which few have nearly all: one binary choice after the other.

Sort the classes by their probabilities, p_1 >= p_2 >= ..., with s_k = p_k + p_{k+1} + ....  To draw a class is to ask
whether it is the first one, if not, whether it is the second, and so on.  The answer to question k has the probability
p_k/s_k and the logit z_k - log Σ_{j>k} exp z_j, and it is asked for with probability s_k.  Their Fisher informations
add up:

    M = diag(p) - p pᵀ = Σ_k u_k u_kᵀ,        u_k = √(p_k s_{k+1}/s_k) (e_k - Σ_{j>k} p_j e_j/s_{k+1}),

which is the Cholesky decomposition with pivots.  After m questions diag(p) - p pᵀ/s_{m+1} of the other classes is left.
For peaked predictions that is nearly nothing: the columns are about as good as eigenvectors, which have to be searched
for.  A diagonal metric has the columns √ζ_k e_k.

Axis letters: n sample, k column, c class.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from neuromanifold.core import Categorical, Core
from neuromanifold.core.diagonal import DiagonalCore
from neuromanifold.core.sums import divide, square_root
from neuromanifold.estimators.base import signs

COLUMNS = 9
"""So many columns of a sample are looked at, at most: all of them for ten classes."""


@dataclass(frozen=True)
class Choices:
    """The first columns u_k of each of n metrics, and what is left without them."""

    weights: Tensor  # [n, c] probabilities p, or ζ of a diagonal metric
    diagonal: bool

    @staticmethod
    def of(core: Core) -> Choices | None:
        """The columns of distributions of which they are known."""
        if isinstance(core, Categorical):
            return Choices(core.probs.detach(), diagonal=False)
        return Choices(core.diagonal.detach(), diagonal=True) if isinstance(core, DiagonalCore) else None

    @staticmethod
    def joined(parts: list[Choices | None]) -> Choices | None:
        """Those of several batches, if they are known of all, with the same number of classes."""
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or len({(part.weights.shape[-1], part.diagonal) for part in found}) != 1:
            return None
        return Choices(torch.cat([part.weights for part in found]), found[0].diagonal)

    @property
    def count(self) -> int:
        """How many columns are looked at."""
        return min(COLUMNS, self.weights.shape[-1] - (not self.diagonal))

    def only(self, rows: Tensor) -> Choices:
        """Those of some of the metrics."""
        return Choices(self.weights[rows.to(self.weights.device)], self.diagonal)

    @cached_property
    def _classes(self) -> Tensor:
        """The classes that the columns ask for, [n, k]."""
        return self.weights.topk(self.count, dim=-1).indices

    @cached_property
    def _others(self) -> Tensor:
        """The weights of all other classes, [n, c]."""
        return self.weights.scatter(-1, self._classes, 0.0)

    def _left(self, powers: int, dtype: torch.dtype) -> Tensor:
        """Σ p, Σ p², ... over the classes that are left after 0, 1, ... columns, [powers, n, k + 1], all terms >= 0."""
        asked, others = self.weights.gather(-1, self._classes).to(dtype), self._others.to(dtype)
        sums = [torch.cat([asked**power, (others**power).sum(-1, keepdim=True)], -1) for power in range(1, powers + 1)]
        return torch.stack(sums).flip(-1).cumsum(-1).flip(-1)

    def columns(self) -> Tensor:
        """u_k, [n, k, c]."""
        p, classes = self.weights, self._classes[..., None]
        asked = p.gather(-1, self._classes)
        if self.diagonal:
            return p.new_zeros(*asked.shape, p.shape[-1]).scatter(-1, classes, square_root(asked)[..., None])
        left = self._left(1, p.dtype)[0]
        sizes = square_root(asked * divide(left[:, 1:], left[:, :-1]))
        place = torch.full_like(p, self.count, dtype=torch.long).scatter(-1, self._classes, self._order)
        after = place[:, None] > self._order[..., None]  # [n, k, c]: classes that are asked for later
        others = torch.where(after, divide(-p[:, None], left[:, 1:, None]), 0.0)
        return sizes[..., None] * others.scatter(-1, classes, 1.0)

    @property
    def _order(self) -> Tensor:
        """0, 1, ..., [n, k]."""
        return torch.arange(self.count, device=self.weights.device).expand_as(self._classes)

    def probe(self, columns: Tensor, own: Tensor, generator: torch.Generator) -> Tensor:
        """One probe for all but the first `own` [n] columns, [n, c]: Σ ±u_k, and random signs of all other classes."""
        n, k, c = columns.shape
        used = self._order >= own.to(columns.device)[:, None]
        probe = ((signs((n, k), columns, generator) * used)[..., None] * columns).sum(-2)
        if c - k == (not self.diagonal):
            return probe  # nothing is left
        return probe + self.mix(signs((n, c), columns, generator))

    def mix(self, xi: Tensor) -> Tensor:
        """S ξ for ξ [..., n, c], where S Sᵀ is what is left without any of the columns."""
        rest = square_root(self._others) * xi
        if self.diagonal:
            return rest
        return rest - divide(self._others, self._others.sum(-1, keepdim=True)) * rest.sum(-1, keepdim=True)

    def left(self) -> tuple[Tensor, Tensor, Tensor]:
        """tr M_m, ‖M_m‖² and the noise S²_m of a probe of M_m, what is left after m = 0, 1, ... columns, [n, k + 1].

        Of signs along columns with derivatives a_k, Var = 2 (Σa²)² - 2 Σa⁴, so that on average over directions of J,

            S² = Var/2 = t² + 2 ‖M_m‖² - 3 Σ_{k>m} ‖u_k‖⁴,        S²_{m-1} = S²_m + 2 (t_m ‖u_m‖² + 2 u_mᵀ M_m u_m),
            ‖M_{m-1}‖² = ‖M_m‖² + 2 u_mᵀ M_m u_m + ‖u_m‖⁴:

        from the last to the first, nothing cancels.  With s, a and b the sums of p, p² and p³ over the classes left,

            t = ‖u‖² + t',        ‖u‖² = w (1 + a/s²),        uᵀM'u = w/s² (b - a²/s),        w = p s/(p + s).
        """
        (s, a, b, d), k = self._left(4, torch.float64), self.count
        asked = self.weights.gather(-1, self._classes).double()
        if self.diagonal:
            trace, norm, fourths, squares, along = s[:, k:], a[:, k:], a[:, k:], asked, torch.zeros_like(asked)
        else:
            later, shares = s[:, 1:], divide(a, s)  # Σ p²/Σ p
            w = asked * divide(later, s[:, :-1])
            squares = w + divide(w * a[:, 1:], later.square())
            along = divide(w * (b[:, 1:] - a[:, 1:] * shares[:, 1:]), later.square()).clamp(min=0)
            s, a, b, d, trace = s[:, k:], a[:, k:], b[:, k:], d[:, k:], (s - shares)[:, k:]
            one = 1 + divide(a, s.square())  # ‖√p (e - p/s)‖² = p (one - 2p/s)
            fourths = a * one.square() - 4 * divide(b * one, s) + 4 * divide(d, s.square())
            norm = a - 2 * divide(b, s) + divide(a, s).square()
        is_left = self.weights.shape[-1] > k + (not self.diagonal)  # else these are zero, but for rounding
        trace, norm = (part.clamp(min=0) * is_left for part in (trace, norm))
        noise = (trace.square() + 2 * norm - 3 * fourths).clamp(min=0) * is_left
        traces = _from_the_last(squares, trace)
        norms = _from_the_last(2 * along + squares.square(), norm)
        return traces, norms, _from_the_last(2 * (traces[:, 1:] * squares + 2 * along), noise)


def _from_the_last(steps: Tensor, last: Tensor) -> Tensor:
    """The sums of the last number [n, 1] and of the steps to it, [n, k + 1]."""
    return torch.cat([steps, last], -1).flip(-1).cumsum(-1).flip(-1)
