"""A kernel for a CPU, in C, compiled when it is first needed; where it cannot be, torch's operations do the same.

probe.c  the deflated probe of categorical distributions
build    compiling, keeping and loading kernels, those of later stages too
probe    handing tensors to it
"""

from __future__ import annotations

from neuromanifold.estimators.native.probe import deflated_probe, usable

__all__ = ["deflated_probe", "usable"]
