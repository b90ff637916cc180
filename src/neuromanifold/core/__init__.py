"""The core space: p(y | z), its metric, factor, spectrum, envelopes and bounds.  Nothing here knows of a network."""

from neuromanifold.core.base import Core
from neuromanifold.core.bernoulli import Bernoulli
from neuromanifold.core.categorical import Categorical
from neuromanifold.core.gaussian import Gaussian
from neuromanifold.core.spectrum import Spectrum

__all__ = ["Bernoulli", "Categorical", "Core", "Gaussian", "Spectrum"]
