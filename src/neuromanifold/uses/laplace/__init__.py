"""The Laplace approximation: a Gaussian posterior over parameters, what it predicts, and its evidence."""

from neuromanifold.uses.laplace.curvature import Curvature
from neuromanifold.uses.laplace.posterior import Laplace, Prediction

__all__ = ["Curvature", "Laplace", "Prediction"]
