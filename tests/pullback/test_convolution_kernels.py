"""The convolutions' Triton kernels, run by Triton's interpreter on the CPU, against autograd sample by sample."""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton")

from triton.runtime import interpreter

from neuromanifold.pullback.kernels import convolution, depthwise
from neuromanifold.pullback.kernels.convolution import Config, add_squares, pack

SMALL = Config(16, 16, 16, 4, 2)
CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class Problem(NamedTuple):
    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def options(self) -> dict[str, object]:
        names = ("kernel", "stride", "dilation", "groups")
        return dict(zip(names, (self.weight[2:], self.stride, self.dilation, self.groups), strict=True))


PROBLEMS = {
    "1d": Problem((5, 3, 11), (4, 3, 3), (1,), (0,), (1,)),
    "1d strided": Problem((3, 2, 40), (17, 2, 5), (3,), (2,), (2,)),
    "2d": Problem((5, 4, 5, 5), (18, 4, 3, 3), (1, 1), (1, 1), (1, 1)),
    "2d uneven": Problem((2, 3, 9, 8), (5, 3, 3, 2), (2, 1), (1, 2), (1, 2)),
    "2d in 2 groups": Problem((3, 4, 6, 6), (6, 2, 3, 3), (1, 1), (1, 1), (1, 1), 2),
    "3d": Problem((2, 2, 4, 5, 3), (3, 2, 2, 3, 1), (1, 2, 1), (1, 0, 0), (2, 1, 1)),
    "1×1": Problem((4, 18, 5, 4), (17, 18, 1, 1), (1, 1), (0, 0), (1, 1)),
    "1×1, one tile": Problem((4, 16, 2, 4), (8, 16, 1, 1), (1, 1), (0, 0), (1, 1)),
    "1×1 in 2 groups": Problem((3, 16, 3, 3), (16, 8, 1, 1), (1, 1), (0, 0), (1, 1), 2),
    "1×1 strided": Problem((3, 5, 6, 6), (4, 5, 1, 1), (2, 2), (0, 0), (1, 1)),
    "one sample": Problem((1, 3, 6, 6), (4, 3, 3, 3), (1, 1), (1, 1), (1, 1)),
    "one position": Problem((5, 3, 3, 3), (4, 3, 3, 3), (1, 1), (0, 0), (1, 1)),
}
DEPTHWISE = {
    "3×3": Problem((5, 4, 7, 6), (4, 1, 3, 3), (1, 1), (1, 1), (1, 1), 4),
    "5×5 strided, 2 for each": Problem((2, 2, 7, 7), (4, 1, 5, 5), (2, 2), (2, 2), (1, 1), 2),
    "1d dilated": Problem((3, 4, 30), (8, 1, 3), (1,), (0,), (3,), 4),
    "3d": Problem((2, 2, 4, 4, 4), (2, 1, 2, 3, 2), (1, 1, 2), (0, 1, 0), (1, 1, 1), 2),
    "two channels of a group": Problem((2, 4, 5, 6), (4, 2, 4, 3), (1, 1), (0, 0), (1, 1), 2),
    "one sample, many positions": Problem((1, 2, 34, 34), (2, 1, 3, 3), (1, 1), (0, 0), (1, 1), 2),
}
each = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


@pytest.fixture(autouse=True)
def _loops(monkeypatch):
    """The interpreter takes a loop's bounds out of arrays with one element in a way that numpy 2.4 forbids."""
    patch = interpreter._patch_lang_tensor

    def patch_too(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_too)


def data(problem: Problem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x, padded, and g."""
    generator = torch.Generator().manual_seed(sum(problem.x))
    x = torch.randn(problem.x, generator=generator).to(dtype)
    x = functional.pad(x, [amount for size in reversed(problem.padding) for amount in (size, size)])
    y = forward(problem, x[:1].double(), torch.zeros(problem.weight, dtype=torch.float64))
    return x, torch.randn(len(x), *y.shape[1:], generator=generator).to(dtype)


def forward(problem: Problem, x: Tensor, weight: Tensor) -> Tensor:
    convolve = CONVOLUTIONS[weight.ndim - 2]
    return convolve(x, weight, stride=problem.stride, dilation=problem.dilation, groups=problem.groups)


def truth(problem: Problem, x: Tensor, g: Tensor) -> Tensor:
    """G [n, o, i] in float64."""
    found = torch.zeros(len(x), problem.weight[0], _width(problem)).double()
    for n in range(len(x)):
        weight = torch.zeros(problem.weight, dtype=torch.float64, requires_grad=True)
        y = forward(problem, x[n : n + 1].double(), weight)
        found[n] = torch.autograd.grad(y, weight, g[n : n + 1].double())[0].flatten(1)
    return found


def _width(problem: Problem) -> int:
    return torch.Size(problem.weight[1:]).numel()


def sums_like(problem: Problem) -> Tensor:
    return torch.full((problem.weight[0], _width(problem)), 2.0)


def last(values: Tensor) -> Tensor:
    """The same, channels last in memory."""
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> bool:
    return float((found.double() - expected).norm()) <= tolerance * float(expected.norm())


@each
@pytest.mark.parametrize(("channels_last", "split"), [(False, 1), (True, 3)])
def test_gradients_are_squared_sample_by_sample(problem, channels_last, split):
    x, g = data(problem)
    G = truth(problem, x, g) * 0.5
    x, g = (last(x), last(g)) if channels_last else (x, g)
    squares, fourths = sums_like(problem), sums_like(problem)
    weights = {"square_weight": 4.0, "fourth_weight": 3.0, "factor": 0.5}
    add_squares(x, g, squares, fourths, **problem.options, **weights, split=split, config=SMALL)
    assert close(squares, 2 + 4 * G.square().sum(0))
    assert close(fourths, 2 + 3 * G.pow(4).sum(0))
    if len(x) > 1:  # the square of the batch's gradient is something else
        assert not close(squares, 2 + 4 * G.sum(0).square(), 0.1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fourths", [None, 2.0])
def test_shares_of_the_samples_add_up(deterministic, fourths):
    problem = PROBLEMS["2d"]
    x, g = data(problem)
    squares, powers = sums_like(problem), None if fourths is None else sums_like(problem)
    add_squares(x, g, squares, powers, **problem.options, split=2, config=SMALL, deterministic=deterministic)
    assert close(squares, 2 + truth(problem, x, g).square().sum(0))
    assert powers is None or close(powers, 2 + truth(problem, x, g).pow(4).sum(0))


@pytest.mark.parametrize("name", ["2d", "1×1"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_half_precision(name, channels_last):
    problem = PROBLEMS[name]
    x, g = data(problem, torch.float16)  # the interpreter has no products of bfloat16
    G = truth(problem, x, g)
    x, g = (last(x), last(g)) if channels_last else (x, g)
    squares = sums_like(problem)
    add_squares(x, g, squares, **problem.options, precision="half", config=SMALL)
    assert close(squares, 2 + G.square().sum(0))


@pytest.mark.parametrize("precision", convolution.CONFIGS)
@pytest.mark.parametrize("fourths", [False, True])
def test_blocks_that_are_chosen(precision, fourths):
    problem = PROBLEMS["2d in 2 groups"]
    x, g = data(problem, torch.float16 if precision == "half" else torch.float32)
    squares, powers = sums_like(problem), sums_like(problem) if fourths else None
    add_squares(x, g, squares, powers, **problem.options, precision=precision)
    assert close(squares, 2 + truth(problem, x, g).square().sum(0), 1e-3)


@pytest.mark.parametrize("name", ["2d in 2 groups", "1×1"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_packed_operands_have_11_bits(name, channels_last):
    """Magnitudes that float16 has no room for, different in each channel of each sample."""
    problem = PROBLEMS[name]
    x, g = data(problem)
    x, g = (_uneven(values) for values in (x, g))
    squares, fourths = (torch.zeros_like(sums_like(problem)) for _ in range(2))
    (packed_x, x_scale), (packed_g, g_scale) = (pack(values, channels_last=channels_last) for values in (x, g))
    add_squares(
        *(packed_x, packed_g, squares, fourths),
        **problem.options,
        precision="half",
        factor=1e-3,
        x_scale=x_scale,
        g_scale=g_scale,
        config=SMALL,
    )
    G = 1e-3 * truth(problem, unpacked(packed_x, x_scale), unpacked(packed_g, g_scale))
    assert (squares / G.square().sum(0) - 1).abs().max() < 1e-3  # each cell, of whatever size: packing was exact
    assert close(fourths, G.pow(4).sum(0))
    assert close(squares, (1e-3 * truth(problem, x, g)).square().sum(0), 2e-3)  # and loses little


def unpacked(packed: Tensor, scales: Tensor) -> Tensor:
    return packed.double() * scales.double().view(*scales.shape, *(1,) * (packed.ndim - 2))


def _uneven(values: Tensor) -> Tensor:
    """Each channel of each sample with a magnitude of its own, from 10⁻⁵ to 10⁵."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** torch.empty(values.shape[:2]).uniform_(-5, 5, generator=generator)
    return values * size.view(*values.shape[:2], *(1,) * (values.ndim - 2))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 18, 3, 11), (1, 1, 2, 2, 2), (2, 4, 1), (0, 3, 4)])
def test_pack_keeps_11_bits(shape, channels_last):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if len(values):
        values[0, 0] = 0
        values[-1, -1] *= 1e30
        values[0, -1] *= 1e-30
    packed, scales = pack(values, channels_last=channels_last)
    assert packed.dtype == torch.float16
    assert packed.shape == values.shape
    assert scales.shape == values.shape[:2]
    assert (torch.frexp(scales).mantissa == 0.5).all()  # powers of two
    largest = packed.flatten(2).abs().amax(2)
    assert ((largest == 0) | (largest >= 2**13) & (largest <= 2**14)).all()
    found = unpacked(packed, scales)
    assert ((found - values).abs() <= 2**-11 * values.abs()).all()


def test_pack_pads():
    values = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for channels_last in (False, True):
        packed, scales = pack(values, (1, 2), channels_last=channels_last)
        plain, same = pack(values)
        assert torch.equal(packed, functional.pad(plain, (2, 2, 1, 1)))
        assert torch.equal(scales, same)
        assert packed.is_contiguous() != channels_last


def test_pack_takes_extremes():
    values = torch.tensor([[[3e38, 1e30], [1.2e-38, 3e-38], [torch.inf, 1.0], [torch.nan, 1.0]]])
    packed, scales = pack(values)
    found = unpacked(packed, scales)
    assert ((found[0, :2] - values[0, :2]).abs() <= 2**-11 * values[0, :2].abs()).all()
    assert found[0, 2, 0] == torch.inf
    assert found[0, 3, 0].isnan()
    assert scales.isfinite().all()


def test_non_finite_values_stay_in_their_sums():
    problem = PROBLEMS["2d"]
    x, g = data(problem)
    x[1, 2, 3, 3] = torch.inf
    squares = sums_like(problem)
    add_squares(x, g, squares, **problem.options, config=SMALL)
    hit = torch.zeros(problem.weight[1:]).bool()
    hit[2] = True  # the only channel that has seen it
    assert torch.equal(squares.isfinite().view(problem.weight), ~hit.expand(problem.weight))


def test_nothing_comes_of_no_samples():
    problem = PROBLEMS["2d"]
    x, g = (values[:0] for values in data(problem))
    squares = sums_like(problem)
    add_squares(x, g, squares, **problem.options)
    assert (squares == 2).all()
    assert depthwise.gradients(x, g[:, :4], **(problem.options | {"groups": 4})).shape == (0, 4, 9)


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "half"},
        {"precision": "double"},
        {"kernel": (5, 5)},
        {"x_scale": torch.ones(2, 2)},
        {"config": Config(16, 16, 512, 4, 2)},
        {"squares": torch.zeros(18, 36, dtype=torch.float64)},
    ],
    ids=str,
)
def test_what_would_be_misread_is_refused(change):
    x, g = data(PROBLEMS["2d"])
    arguments = {"squares": sums_like(PROBLEMS["2d"])} | PROBLEMS["2d"].options | change
    with pytest.raises(ValueError, match=r"float32|precision|windows|block_t"):
        add_squares(x, g, **arguments)
    with pytest.raises(ValueError, match="contiguous"):
        add_squares(x[:, :, ::2], g, sums_like(PROBLEMS["2d"]), **PROBLEMS["2d"].options)


@pytest.mark.parametrize("problem", DEPTHWISE.values(), ids=DEPTHWISE)
@pytest.mark.parametrize("by_taps", [None, False, True])
def test_depthwise_gradients(problem, by_taps):
    x, g = data(problem)
    config = None if by_taps is None else depthwise.Config(16, 8 if by_taps else 7, by_taps, 1)
    found = depthwise.gradients(x, g, **problem.options, config=config)
    G = truth(problem, x, g)
    assert found.dtype == torch.float32
    assert close(found, G)
    if len(x) > 1:
        assert not close(found.square().sum(0), G.sum(0).square(), 0.1)


@pytest.mark.parametrize("dtype", convolution.HALF)
def test_depthwise_gradients_of_half_precision(dtype):
    problem = DEPTHWISE["3×3"]
    x, g = data(problem, dtype)
    assert close(depthwise.gradients(x, g, **problem.options), truth(problem, x, g))


def test_depthwise_refuses_other_layouts():
    problem = DEPTHWISE["3×3"]
    x, g = data(problem)
    with pytest.raises(ValueError, match="contiguous"):
        depthwise.gradients(last(x), g, **problem.options)
