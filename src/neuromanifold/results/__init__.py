"""Results: values with standard errors and provenance, which add, compare, print and save."""

from pathlib import Path

from neuromanifold.results.comparison import Comparison
from neuromanifold.results.diagonal import DiagonalFisher, load_diagonal
from neuromanifold.results.factors import FisherFactors, load_factors
from neuromanifold.results.files import FileError, is_json, kind_of
from neuromanifold.results.matrix import FisherMatrix, load_matrix
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.trace import TraceEstimate, load_trace

__all__ = [
    "Comparison",
    "DiagonalFisher",
    "FileError",
    "FisherFactors",
    "FisherMatrix",
    "Provenance",
    "TraceEstimate",
    "load",
]


def load(path: str | Path) -> DiagonalFisher | TraceEstimate | FisherFactors | FisherMatrix:
    """Read a result of any kind: a trace from a JSON file, all others from safetensors files, whatever their names."""
    if is_json(path):
        return load_trace(path)
    kind = kind_of(path)
    if kind == "factors":
        return load_factors(path)
    return load_matrix(path) if kind == "matrix" else load_diagonal(path)
