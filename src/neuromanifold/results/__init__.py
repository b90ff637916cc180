"""Results: values with standard errors and provenance, which add, compare, print and save."""

from pathlib import Path

from neuromanifold.results.comparison import Comparison
from neuromanifold.results.diagonal import DiagonalFisher, load_diagonal
from neuromanifold.results.files import FileError, is_json
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.trace import TraceEstimate, load_trace

__all__ = ["Comparison", "DiagonalFisher", "FileError", "Provenance", "TraceEstimate", "load"]


def load(path: str | Path) -> DiagonalFisher | TraceEstimate:
    """Read a result: a diagonal from a safetensors file, a trace from a JSON file, whatever they are called."""
    return load_trace(path) if is_json(path) else load_diagonal(path)
