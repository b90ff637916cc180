"""Second and fourth powers of small parameters in C: against float64, and where torch does the same."""

import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from neuromanifold.kernels import dispatch
from neuromanifold.kernels.c import build, powers
from neuromanifold.persample.accumulate import DiagonalSums, Pass
from neuromanifold.persample.accumulate.small import SmallSums
from neuromanifold.persample.gradients import Product
from neuromanifold.persample.gradients.products import SquaredProduct

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def wanted(monkeypatch):
    monkeypatch.delenv("NEUROMANIFOLD_KERNELS", raising=False)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def truth(values: list[Tensor], scale: float, power: int) -> Tensor:
    return torch.cat([(v.double() / scale).pow(power).sum(0).flatten() for v in values])


@needs_compiler
@pytest.mark.parametrize("samples", [0, 1, 7, 64])
@pytest.mark.parametrize(
    "shapes", [[(3,)], [()], [(512,), (0,), (513,)], [(4, 5), (2000,), (1,), (1024,)]], ids=lambda shapes: str(shapes)
)
def test_sums_of_powers(samples, shapes):
    values = [noise(samples, *shape) for shape in shapes]
    width = sum(v.shape[1:].numel() for v in values)
    squares, fourths = torch.ones(width), torch.ones(width, dtype=torch.float64)
    assert dispatch.add_powers(values, 4.0, 0.5, squares, fourths)
    torch.testing.assert_close(squares.double(), 1 + truth(values, 4.0, 2), rtol=1e-6, atol=0)
    torch.testing.assert_close(fourths, 1 + 0.5 * truth(values, 4.0, 4), rtol=1e-12, atol=0)
    assert dispatch.add_powers(values, 4.0, 0.5, squares)
    torch.testing.assert_close(squares.double(), 1 + 2 * truth(values, 4.0, 2), rtol=1e-6, atol=0)


@needs_compiler
def test_any_strides():
    values = [
        noise(9, 40).T,
        noise(20, 60)[::2, ::3][:, :7],
        noise(1, 5).expand(40, 5),
        noise(40, 3, 4).transpose(1, 2),
    ]
    values = [v[:10] for v in values]
    squares = torch.zeros(sum(v.shape[1:].numel() for v in values))
    assert dispatch.add_powers(values, 1.0, 1.0, squares)
    torch.testing.assert_close(squares.double(), truth(values, 1.0, 2), rtol=1e-6, atol=0)


@needs_compiler
def test_sums_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(powers, "_ALONE", 0)
    values, found, threads = [noise(11, 3000), noise(11, 700)], [], torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(torch.zeros(3700))
            assert dispatch.add_powers(values, 1.0, 1.0, found[-1])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found[0].double(), truth(values, 1.0, 2), rtol=1e-6, atol=0)
    assert all(torch.equal(one, found[0]) for one in found)


@needs_compiler
def test_small_sums_use_it_and_agree_with_torch(monkeypatch):
    calls, run, found = [], powers.call_powers, []
    monkeypatch.setattr(powers, "call_powers", lambda *given: calls.append(run(*given)) or calls[-1])
    for wish in ("1", "0"):
        monkeypatch.setenv("NEUROMANIFOLD_KERNELS", wish)
        sums = SmallSums()
        for step in range(3):
            sums.add(0, noise(4, 30 + step)[:, :30], 2.0, 0.25)
            sums.add(1, noise(4, 5 + step)[:, :5], 2.0, 0.25)
            sums.flush()
        found.append((sums.squares(), sums.fourths()))
    assert calls == [True] * 3
    for ours, by_torch in zip(*found, strict=True):
        for i in (0, 1):
            torch.testing.assert_close(ours[i], by_torch[i], rtol=1e-6, atol=0)


def test_what_it_does_not_take(monkeypatch):
    assert not dispatch.add_powers([noise(3, 4), noise(3, 4).double()], 1.0, 1.0, torch.zeros(8))
    assert not dispatch.add_powers([torch.nn.Parameter(noise(3, 4))], 1.0, 1.0, torch.zeros(4))
    assert not dispatch.add_powers([noise(3, 4)], 1.0, 1.0, torch.zeros(4, dtype=torch.float64))
    monkeypatch.setattr(powers, "_ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(build, "parallel", lambda: None)
    assert not dispatch.add_powers([noise(3, 4)], 1.0, 1.0, torch.zeros(4))


@needs_compiler
def test_the_source_has_no_warnings(tmp_path):
    flags = ["-Wall", "-Wextra", "-Wshadow", "-Werror", "-O3", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", tmp_path / "a.so", powers.SOURCE], check=True)


def test_the_last_error_bars_take_the_memory_of_their_sums():
    parameter = torch.zeros(300, 40)
    sums = DiagonalSums([parameter], fourth_powers=True)
    sums.add_samples(0, Product(noise(5, 1, 300), noise(5, 1, 40)), Pass(1.0, 0.5, 0.5))
    (kept,) = sums._fourths
    (before,) = sums.noise()
    assert before.data_ptr() != kept.data_ptr()
    (again,) = sums.noise()
    (last,) = sums.noise(last=True)
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


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_are_float32_whatever_torch_makes_by_default(dtype):
    """The kernel writes float32: into memory of another type that would be nonsense, or beyond its end."""
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
    torch.testing.assert_close(fourths, truth([values], 1.0, 4), rtol=1e-12, atol=0)


@pytest.mark.parametrize("later", [2.0**-10, 2.0**-35, 2.0**-45])
def test_what_was_captured_without_a_unit_is_not_lost(later):
    """Gradients may come for the first time while a CUDA graph is captured, and be far smaller in the next batch."""
    sums, one = DiagonalSums([torch.zeros(4)], fourth_powers=True), Pass(1.0, 1.0, 1.0)
    sums.capturing = True
    sums.add([torch.ones(4)], one)
    sums.capturing = False
    sums.synchronize()
    sums.add([torch.full((4,), later)], one)
    torch.testing.assert_close(sums.noise()[0], torch.ones(4), rtol=1e-5, atol=0)
