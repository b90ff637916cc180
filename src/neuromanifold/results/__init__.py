"""Results: values with standard errors and provenance, which add, compare, print and save."""

from neuromanifold.results.comparison import Comparison
from neuromanifold.results.diagonal import DiagonalFisher
from neuromanifold.results.files import FileError, load
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.trace import TraceEstimate

__all__ = ["Comparison", "DiagonalFisher", "FileError", "Provenance", "TraceEstimate", "load"]
