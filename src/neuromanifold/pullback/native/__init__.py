"""A kernel for a CPU, in C, compiled when it is first needed; where it cannot be, torch's operations do the same.

square.c  Σ_n (Σ_t left ⊗ right)², for linear layers and convolutions
square    handing tensors to it

Compiling and loading is done by `neuromanifold.estimators.native.build`.
"""

from __future__ import annotations

from neuromanifold.pullback.native.square import add_squares_of_convolution, add_squares_of_products

__all__ = ["add_squares_of_convolution", "add_squares_of_products"]
