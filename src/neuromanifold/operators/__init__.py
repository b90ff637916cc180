"""The Fisher information as a matrix: operator, low-rank factors, dense matrix, and the linear algebra on them."""

from pathlib import Path

from neuromanifold.operators.factors_result import FisherFactors, load_factors
from neuromanifold.operators.matrix_result import FisherMatrix, load_matrix
from neuromanifold.results.diagonal import DiagonalFisher, load_diagonal
from neuromanifold.results.files import is_json, kind_of
from neuromanifold.results.trace import TraceEstimate, load_trace

__all__ = ["FisherFactors", "FisherMatrix", "load"]


def load(path: str | Path) -> DiagonalFisher | TraceEstimate | FisherFactors | FisherMatrix:
    """Read a result of any kind: a trace from a JSON file, all others from safetensors files, whatever their names."""
    if is_json(path):
        return load_trace(path)
    kind = kind_of(path)
    if kind == "factors":
        return load_factors(path)
    return load_matrix(path) if kind == "matrix" else load_diagonal(path)
