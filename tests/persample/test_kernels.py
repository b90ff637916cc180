"""The Triton kernels, run by Triton's interpreter on the CPU, against the obvious sums in float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from neuromanifold.kernels.triton.launch import split_samples
from neuromanifold.kernels.triton.norms import launch_channel_norm
from neuromanifold.kernels.triton.pack import GROUP, Packed, pack
from neuromanifold.kernels.triton.product import (
    SHARED,
    ProductTiles,
    launch_product_squares,
    product_launch,
    product_tiles,
)

SMALL = ProductTiles(16, 16, 16, 4, 2, 1)
SHAPES = [(5, 7, 20, 33), (1, 16, 16, 16), (3, 1, 5, 4), (4, 40, 17, 16), (2, 33, 3, 50), (6, 70, 9, 9)]  # n, t, o, i


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def products(left: Tensor, right: Tensor) -> Tensor:
    return torch.einsum("nto,nti->noi", left.double(), right.double())


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> bool:
    return float((found.double() - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # bfloat16: benchmarks/gpu/kernels.py, on a GPU
@pytest.mark.parametrize("parts", [1, 3])
def test_products_are_squared_sample_by_sample(shape, dtype, parts):
    n, t, o, i = shape
    left, right = noise(n, t, o, dtype=dtype), noise(n, t, i + 1, dtype=dtype)[..., :-1]
    squares, fourths = torch.ones(o, i), torch.ones(o, i)
    launch_product_squares(left, right, squares, fourths, factors=(4.0, 3.0, 0.5), config=SMALL, parts=min(parts, n))
    truth = products(left, right) * 0.5
    assert close(squares, 1 + 4 * truth.square().sum(0))
    assert close(fourths, 1 + 3 * truth.pow(4).sum(0))
    if n > 1:
        assert not close(squares, 1 + 4 * truth.sum(0).square(), 0.1)  # the square of the batch is something else


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_norms_of_the_rows_of_each_product_are_added_over_tiles_and_programs(shape, parts):
    n, t, o, i = shape
    left, right, squares, norms = noise(n, t, o), noise(n, t, i), torch.ones(o, i), torch.ones(n, o)
    launch_product_squares(
        left, right, squares, norms=norms, factors=(4.0, 9.0, 0.5), config=SMALL, parts=min(parts, n)
    )
    truth = products(left, right) * 0.5
    assert close(squares, 1 + 4 * truth.square().sum(0))
    assert close(norms, 1 + truth.square().sum(2))


def test_products_without_fourth_powers_and_in_a_fixed_order():
    left, right, squares = noise(5, 20, 18), noise(5, 20, 30), torch.zeros(18, 30)
    for _ in range(2):
        launch_product_squares(left, right, squares, factors=(2.0, 9.0, 3.0), config=SMALL, parts=3, deterministic=True)
    assert close(squares, 2 * 18 * products(left, right).square().sum(0))


def test_products_of_any_strides_and_of_nothing():
    left, right = noise(20, 4, 18).transpose(0, 1), noise(1, 20, 30).expand(4, 20, 30)
    squares = torch.zeros(18, 30)
    launch_product_squares(left, right, squares)
    assert close(squares, products(left, right).square().sum(0))
    before = squares.clone()
    launch_product_squares(left[:0], right[:0], squares)
    launch_product_squares(left[:, :0], right[:, :0], squares)
    assert torch.equal(squares, before)


def test_rows_that_are_left_out():
    left, right, squares = noise(4, 20, 18), noise(4, 20, 30), torch.zeros(18, 30)
    skip = noise(4, 18) > 0
    launch_product_squares(left, right, squares, skip=skip.to(torch.uint8), config=SMALL)
    truth = products(left, right) * ~skip[:, :, None]
    assert close(squares, truth.square().sum(0))


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("shape", [(3, 5, 130), (2, 70, 128), (1, 1, 1), (2, 3, 300)])
def test_packed_numbers_keep_eleven_bits(size, shape):
    values = noise(*shape) * size
    values[0, 0, 0] = 0.0
    packed = pack(values)
    scales = packed.scales.repeat_interleave(GROUP, dim=1)[:, None, : shape[2]]
    found = packed.values.double() * scales.double()
    assert torch.all((found - values.double()).abs() <= 2**-11 * values.double().abs())
    assert torch.equal(packed.scales.log2().round().exp2(), packed.scales)


def test_packing_zeros_and_what_is_not_finite():
    values = torch.zeros(2, 3, 4)
    assert torch.equal(pack(values).values, values.half())
    values[1, 1, 1] = torch.inf
    assert not pack(values).values.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_products(shape):
    n, t, o, i = shape
    samples = torch.logspace(-12, 3, n)[:, None, None]  # far apart, as gradients of samples are
    left, right = noise(n, t, o) * samples, noise(n, t, i)
    squares, packed = torch.zeros(o, i), [pack(left), pack(right)]
    launch_product_squares(*packed, squares, config=SMALL)
    assert close(squares, products(left, right).square().sum(0), 2e-3)
    first = [Packed(side.values[:1], side.scales[:1]) for side in packed]  # the smallest sample on its own
    launch_product_squares(*first, squares.zero_(), config=SMALL)
    assert close(squares, products(left[:1], right[:1]).square().sum(0), 2e-3)


@pytest.mark.parametrize("shape", [(2, 3, 20), (1, 1, 1), (3, 5, 1500), (0, 4, 5), (2, 70, 49)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_normalised_channels(shape, dtype):
    x, g = noise(*shape, dtype=dtype) + 3, noise(*shape, dtype=dtype).flip(0)
    mean, variance = noise(shape[1]) + 3, noise(shape[1]).square()
    scale, shift = launch_channel_norm(x, g, mean, variance, 0.1)
    hat = (x.double() - mean.double()[:, None]) * (variance.double()[:, None] + 0.1).rsqrt()
    assert close(scale, (hat * g.double()).sum(2), 1e-5)
    assert close(shift, g.double().sum(2), 1e-5)


def test_samples_are_split_so_that_every_multiprocessor_works():
    assert split_samples(tiles=1000, samples=64, steps=8, slots=132) <= 4
    assert split_samples(tiles=4, samples=64, steps=8, slots=132) >= 16
    assert split_samples(tiles=1, samples=1, steps=1, slots=132) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [1, 49, 64, 100, 128, 200, 256, 512, 5000])
@pytest.mark.parametrize("o", [1, 70, 768, 50257])
@pytest.mark.parametrize("fourths", [False, True])
def test_tiles_fit_the_memory_of_a_multiprocessor(dtype, t, o, fourths):
    config = product_tiles(dtype, t, o, 768, fourths)
    assert config.outs < 2 * max(16, o)
    assert config.shared(dtype.itemsize) <= SHARED
    _, _, options = product_launch(
        torch.device("cpu"), dtype, 64, t, o, 768, (False, False, fourths, False), None, None
    )
    assert max(1, options["STEPS"]) * config.shared(dtype.itemsize) <= SHARED
