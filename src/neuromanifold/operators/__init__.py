"""The Fisher information as a matrix: operator, low-rank factors, dense matrix, and the linear algebra on them."""

from neuromanifold.operators.factors import FisherFactors
from neuromanifold.operators.matrix import FisherMatrix

__all__ = ["FisherFactors", "FisherMatrix"]
