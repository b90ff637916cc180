"""Results as values that scale, 0.5 * fim, fim / 2, sum([...]) of several; and as sums over samples with two views."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Self

from neuromanifold.core.checks import Reduction, message


class Reducible(ABC):
    """A sum over samples, of which `reduction` chooses the view."""

    reduction: Reduction

    @property
    def mean(self) -> Self:
        """The view per sample: sums divided by the number of samples."""
        return self._view("mean")

    @property
    def sum(self) -> Self:
        """The view as a sum over samples, which is what the paper writes F for."""
        return self._view("sum")

    @abstractmethod
    def _view(self, reduction: Reduction) -> Self:
        """The same result in another view."""


class Scalable(ABC):
    """A result that can be multiplied by a positive number: values and standard errors scale, the count stays.

    `provenance.scale` says by how much.
    """

    __array_ufunc__ = None  # numpy's numbers leave the multiplication to the result

    @abstractmethod
    def _times(self, factor: float) -> Self:
        """The result with sums and standard errors multiplied, and `provenance.scale` with them."""

    def __mul__(self, factor: float) -> Self:
        if isinstance(factor, bool) or not isinstance(factor, Real):
            return NotImplemented
        if not 0 < factor < math.inf:
            raise ValueError(message("factor", "a positive number", repr(factor)))
        return self._times(float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Self:
        if not isinstance(divisor, Real):
            return NotImplemented
        return self * (1 / float(divisor))

    def __radd__(self, other: object) -> Self:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # so that sum(results) works
