"""Per-sample gradients in the form in which a layer has them: never as one tensor [samples, *parameter].

A layer's rule turns its input and the gradient of its output into one of these for each of its parameters.  Squares,
fourth powers and norms are computed here, for a few samples and a tile of the parameter at a time.

    Dense        the gradients themselves [n, ...]: biases, scales, everything small
    Product      Σ_t left_t ⊗ right_t: linear layers, t the positions of a sample
    Rows         Σ_t g_t into row id_t: embeddings
    Routed       Σ_r left_r ⊗ right_r over rows, in the matrix of several that each went through: experts
    Convolution  Product with the windows of the input, which are not written out

Letters: n sample, t position, o/i out/in features.
"""

from __future__ import annotations

from neuromanifold.kernels.values import BOUND, PowerSums
from neuromanifold.persample.gradients.forms import (
    Dense,
    Form,
    Product,
    SquaredProduct,
    ranges,
    root_mean_square,
    row_limit,
    tile_size,
)
from neuromanifold.persample.gradients.rows import Routed, Rows, of_samples
from neuromanifold.persample.gradients.totals import Sum, add

__all__ = [
    "BOUND",
    "Dense",
    "Form",
    "PowerSums",
    "Product",
    "Routed",
    "Rows",
    "SquaredProduct",
    "Sum",
    "add",
    "of_samples",
    "ranges",
    "root_mean_square",
    "row_limit",
    "tile_size",
]
