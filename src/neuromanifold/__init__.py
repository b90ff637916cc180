"""The metric tensor of a neural network, its Fisher information, with known accuracy."""

from neuromanifold.core import Bernoulli, Categorical, Core, Gaussian, Spectrum

__version__ = "0.1.0"

__all__ = [
    # core space
    "Bernoulli",
    "Categorical",
    "Core",
    "Gaussian",
    "Spectrum",
    # version
    "__version__",
]
