"""Accumulators: what is kept of the gradients of all backward passes.

DiagonalSums   Σ g² and Σ g⁴ of every entry
FactorSums     Kronecker factors Σ l lᵀ and Σ r rᵀ of layers
EigenvalueSums Σ g² in the basis of their eigenvectors
TraceSums      Σ ‖g‖², no tensor of a parameter's size
GradientRows   the gradients themselves, as rows
KeptForms      the gradients themselves, as they come
"""

from __future__ import annotations

from neuromanifold.persample.accumulate.base import GradientSums, Pass, SharedSums
from neuromanifold.persample.accumulate.diagonal import DiagonalSums
from neuromanifold.persample.accumulate.eigenvalues import Basis, EigenvalueSums
from neuromanifold.persample.accumulate.factors import FactorSums, WeightSharing
from neuromanifold.persample.accumulate.fourth_powers import Tally
from neuromanifold.persample.accumulate.pairs import FactorShape
from neuromanifold.persample.accumulate.rows import GradientRows, KeptForms
from neuromanifold.persample.accumulate.trace import TraceOfParts, TraceSums

__all__ = [
    "Basis",
    "DiagonalSums",
    "EigenvalueSums",
    "FactorShape",
    "FactorSums",
    "GradientRows",
    "GradientSums",
    "KeptForms",
    "Pass",
    "SharedSums",
    "Tally",
    "TraceOfParts",
    "TraceSums",
    "WeightSharing",
]
