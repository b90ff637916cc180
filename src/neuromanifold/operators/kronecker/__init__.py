"""The Fisher information in Kronecker form: a block for each layer, from two small factors and their eigenvectors."""

from neuromanifold.operators.kronecker.result import KroneckerFisher
from neuromanifold.operators.kronecker.run import fisher_kronecker

__all__ = ["KroneckerFisher", "fisher_kronecker"]
