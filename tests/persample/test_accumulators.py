"""Sums of squares and fourth powers: their memory, units and precision."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuromanifold.estimators import NoiseFactors
from neuromanifold.persample.accumulate import DiagonalSums, Pass
from neuromanifold.persample.accumulate.small import SmallSums
from neuromanifold.persample.gradients import Product, forms
from neuromanifold.persample.gradients.forms import SquaredProduct


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def truth(values: list[Tensor], scale: float, power: int) -> Tensor:
    return torch.cat([(v.double() / scale).pow(power).sum(0).flatten() for v in values])


def test_the_last_error_bars_take_the_memory_of_their_sums():
    parameter = torch.zeros(300, 40)
    sums = DiagonalSums([parameter], fourth_powers=True)
    sums.add_samples(0, Product(noise(5, 1, 300), noise(5, 1, 40)), Pass(noise_factors=NoiseFactors(sample=0.5)))
    kept = sums._fourths[0].sums
    assert kept is not None
    (before,) = sums.standard_errors()
    assert before.data_ptr() != kept.data_ptr()
    (again,) = sums.standard_errors()
    (last,) = sums.standard_errors(in_place=True)
    assert last.data_ptr() == kept.data_ptr()
    assert torch.equal(before, again)
    assert torch.equal(before, last)


def test_the_unit_of_squares_is_that_of_the_first_cotangent_that_is_not_zero():
    right, lefts = noise(4, 1, 6), [torch.zeros(4, 5), 1e-20 * noise(4, 5), 3e-19 * noise(5, 5)[:4]]
    form = SquaredProduct.of(Product(lefts[0][:, None], right), torch.float32)
    known = []
    for left in lefts:
        form.add_cotangents(left, 1.0, 0.0)
        known.append(form.unit_is_known)
    assert known == [False, True, True]
    expected = sum(left.double().square() for left in lefts)
    torch.testing.assert_close(form.squares.double() * form.unit.double() ** 2, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("outputs", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("inputs", [1e-12, 1e-6, 1.0, 1e10])
@pytest.mark.parametrize("more", [False, True])
def test_fourth_powers_whatever_the_size_of_inputs_and_output_gradients(inputs: float, outputs: float, more: bool):
    left, right = outputs * noise(6, 1, 5), inputs * noise(6, 1, 4)
    sums = DiagonalSums([torch.zeros(5, 4)], fourth_powers=True)
    sums.add_samples(0, Product(left, right), Pass(noise_factors=NoiseFactors(sample=1.0), more=more))
    sums.end_batch()
    expected = (left.double().mT @ right.double()).pow(4).sum(0).sqrt()
    torch.testing.assert_close(sums.standard_errors()[0].double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1e-60, 1e30, 1e60])
def test_fourth_powers_of_float64_gradients_of_any_size(size: float):
    sums = DiagonalSums([torch.zeros(3, dtype=torch.float64)], fourth_powers=True)
    gradients = [size * noise(3).double(), size * noise(4)[:3].double()]
    for gradient in gradients:
        sums.add([gradient], Pass(noise_factors=NoiseFactors(batch=1.0)))
    expected = torch.stack(gradients).pow(4).sum(0).sqrt()
    torch.testing.assert_close(sums.standard_errors()[0], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_are_float32_whatever_torch_makes_by_default(dtype):
    """Sums of squares of float32 gradients are float32."""
    values, before, sums = noise(5, 700), torch.get_default_dtype(), SmallSums()
    torch.set_default_dtype(dtype)
    try:
        sums.add(0, values, 1.0, 1.0)
        sums.flush()
    finally:
        torch.set_default_dtype(before)
    found, fourths = sums.squares()[0], sums.fourths()[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), truth([values], 1.0, 2), rtol=1e-6, atol=0)
    torch.testing.assert_close(fourths, truth([values], 1.0, 4), rtol=1e-6, atol=0)


@pytest.mark.parametrize("later", [2.0**-10, 2.0**-35, 2.0**-45])
def test_what_was_captured_without_a_unit_is_not_lost(later):
    """Gradients may come for the first time while a CUDA graph is captured, and be far smaller in the next batch."""
    sums, one = DiagonalSums([torch.zeros(4)], fourth_powers=True), Pass(noise_factors=NoiseFactors(batch=1.0))
    with sums.without_synchronization():
        sums.add([torch.ones(4)], one)
    sums.synchronize()
    sums.add([torch.full((4,), later)], one)
    torch.testing.assert_close(sums.standard_errors()[0], torch.ones(4), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", [True, "rows"])
def test_rounded_squares_are_right_to_the_rounding_of_their_factors(kind, monkeypatch):
    """As on a GPU, where squares of bfloat16 stay in it; some rows at a time."""
    parameter = torch.zeros(50, 9)
    left, right = (noise(200, k).to(torch.bfloat16) for k in parameter.shape)
    gradients = left.double()[:, :, None] * right.double()[:, None]
    truth = gradients.square().sum(0), (gradients.square().sum(2) if kind == "rows" else gradients).square()
    limits = 4e-3, 1e-2  # 2⁻⁹ and so, over √200
    monkeypatch.setattr(forms, "GPU_TILE", 2000)
    monkeypatch.setattr(forms, "CPU_TILE", 2000)
    for rounded in (False, True):
        monkeypatch.setattr(forms, "_keeps_bfloat16", lambda *_, rounded=rounded: rounded)
        sums = DiagonalSums([parameter], kind)
        sums.add_samples(0, Product(4 * left[:, None], right[:, None]), Pass(4.0, NoiseFactors(sample=1.0)))
        expected = truth[1].sum(0) if kind == "rows" else truth[1].square().sum(0)
        found = sums.squares[0], sums.standard_errors()[0].square()
        for one, true, limit in zip(found, (truth[0], expected), limits, strict=True):
            error = float((one - true).norm() / true.norm())
            assert error < limit
            assert (error > 1e-6) == rounded


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest new tensor has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(out.untyped_storage().data_ptr() == t.data_ptr() for t in given(args)):
            self.numbers = max(self.numbers, out.untyped_storage().nbytes() // out.element_size())
        return out


def given(arguments):
    return [t.untyped_storage() for t in arguments if isinstance(t, Tensor)]


@pytest.mark.parametrize("kind", [True, "rows", False])
def test_squares_of_tokens_make_no_copy_of_the_cotangents_of_a_large_vocabulary(kind, monkeypatch):
    monkeypatch.setattr(forms, "CPU_TILE", 2**13)
    tokens, vocabulary, width = 64, 2000, 64
    left, right = (noise(tokens, k).to(torch.bfloat16) for k in (vocabulary, width))
    sums, form = DiagonalSums([torch.zeros(vocabulary, width)], kind), Product(left[:, None], right[:, None])
    sums.add_samples(0, form, Pass(noise_factors=NoiseFactors(sample=1.0)))  # sums are allocated
    with Largest() as largest:
        sums.add_samples(0, form, Pass(noise_factors=NoiseFactors(sample=1.0)))
    assert 0 < largest.numbers <= 2 * 2**13 < tokens * vocabulary / 4
