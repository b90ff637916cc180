"""Kernels for a CPU, in C, compiled when they are first needed; where they cannot be, torch's operations do the same.

square.c  Σ_n (Σ_t left ⊗ right)², for linear layers and convolutions
powers.c  Σ_n g² and Σ_n g⁴, for biases and scales
square    handing tensors to the one
powers    and to the other

Compiling and loading is done by `neuromanifold.kernels.c.build`.
"""

from __future__ import annotations

from neuromanifold.kernels.c.powers import add_powers, takes_powers
from neuromanifold.kernels.c.probe import deflated_probe, usable
from neuromanifold.kernels.c.square import add_squares_of_convolution, add_squares_of_products

__all__ = [
    "add_powers",
    "add_squares_of_convolution",
    "add_squares_of_products",
    "deflated_probe",
    "takes_powers",
    "usable",
]
