"""The convolutions' Triton kernels, run by Triton's interpreter on the CPU, against autograd sample by sample."""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton")

from neuromanifold.kernels import dispatch
from neuromanifold.kernels.triton import convolution, depthwise
from neuromanifold.kernels.triton.convolution import add_squares
from neuromanifold.kernels.triton.tiles import HALF, ConvolutionTiles, convolution_tiles
from neuromanifold.kernels.values import Windows
from neuromanifold.persample.gradients import PowerSums
from neuromanifold.persample.rules.convolution import Convolution

SMALL = ConvolutionTiles(16, 16, 16, 4, 2)
CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class Problem(NamedTuple):
    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def windows(self) -> Windows:
        return Windows(self.weight[2:], self.stride, self.padding, self.dilation, self.groups)


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
    "1×1, odd": Problem((3, 5, 3, 3), (4, 5, 1, 1), (1, 1), (0, 0), (1, 1)),
    "1×1 strided": Problem((3, 5, 6, 6), (4, 5, 1, 1), (2, 2), (0, 0), (1, 1)),
    "1×1 padded": Problem((3, 5, 4, 5), (4, 5, 1, 1), (2, 1), (1, 2), (1, 1)),
    "2d without padding": Problem((2, 8, 5, 6), (8, 8, 3, 3), (2, 1), (0, 0), (1, 1)),
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


def data(problem: Problem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x and g."""
    generator = torch.Generator().manual_seed(sum(problem.x))
    x = torch.randn(problem.x, generator=generator).to(dtype)
    y = forward(problem, x[:1].double(), torch.zeros(problem.weight, dtype=torch.float64))
    return x, torch.randn(len(x), *y.shape[1:], generator=generator).to(dtype)


def forward(problem: Problem, x: Tensor, weight: Tensor) -> Tensor:
    convolve = CONVOLUTIONS[weight.ndim - 2]
    return convolve(x, weight, None, problem.stride, problem.padding, problem.dilation, problem.groups)


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
    add_squares(x, g, squares, fourths, problem.windows, factors=(4.0, 3.0, 0.5), split=split, config=SMALL)
    assert close(squares, 2 + 4 * G.square().sum(0))
    assert close(fourths, 2 + 3 * G.pow(4).sum(0))
    if len(x) > 1:  # the square of the batch's gradient is something else
        assert not close(squares, 2 + 4 * G.sum(0).square(), 0.1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fourths", [False, True])
def test_shares_of_the_samples_add_up(deterministic, fourths):
    problem = PROBLEMS["2d uneven"]
    x, g = data(problem)
    squares, powers = sums_like(problem), sums_like(problem) if fourths else None
    options = {"split": 2, "config": SMALL, "deterministic": deterministic}
    add_squares(x, g, squares, powers, problem.windows, **options, factors=(2.0, 1.0, 0.5))
    assert close(squares, 2 + 2 * (0.5 * truth(problem, x, g)).square().sum(0))
    assert powers is None or close(powers, 2 + (0.5 * truth(problem, x, g)).pow(4).sum(0))


LAYOUTS = {  # of x and g
    "first": (torch.clone, torch.clone),
    "last": (last, last),
    "x last": (last, torch.clone),
    "g last": (torch.clone, last),
    "neither": (lambda x: x.mT.contiguous().mT, lambda g: g[:, :, :, :1].expand(g.shape)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["2d", "2d without padding", "2d uneven", "1×1", "1×1, odd", "1×1 strided", "1×1 padded"]
)
def test_half_precision_in_any_layout(name, layout):
    """The interpreter has no products of bfloat16."""
    problem = PROBLEMS[name]
    x, g = (change(values[:2]) for change, values in zip(LAYOUTS[layout], data(problem, torch.float16), strict=True))
    squares = sums_like(problem)
    add_squares(x, g, squares, None, problem.windows, config=SMALL)
    assert close(squares, 2 + truth(problem, x, g).square().sum(0))


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("longer", [0, 1])
def test_of_two_dtypes_the_shorter_one_is_used(layout, longer):
    """As mixed precision has them."""
    problem = PROBLEMS["1×1"]
    tensors = [change(values) for change, values in zip(LAYOUTS[layout], data(problem, torch.float16), strict=True)]
    expected = truth(problem, *tensors).square().sum(0)
    tensors[longer] = tensors[longer].float()
    squares = sums_like(problem)
    add_squares(*tensors, squares, None, problem.windows, config=SMALL)
    assert close(squares, 2 + expected)


def test_what_lies_well_is_not_copied(monkeypatch):
    copied = []
    copy = convolution.Arrangement.__call__
    monkeypatch.setattr(convolution.Arrangement, "__call__", lambda self, x: copied.append(x.shape[1]) or copy(self, x))
    c, o = 18, 17

    def copies(name: str, layout: str, dtype: torch.dtype = torch.float16, **options: bool) -> list[int]:
        copied.clear()
        problem = PROBLEMS[name]._replace(x=(1, c, *PROBLEMS[name].x[2:]), weight=(o, c, *PROBLEMS[name].weight[2:]))
        x, g = (change(values) for change, values in zip(LAYOUTS[layout], data(problem, dtype), strict=True))
        add_squares(x, g, sums_like(problem), None, problem.windows, **options)
        return copied

    assert copies("1×1", "first") == copies("1×1", "last") == copies("2d without padding", "last") == []
    assert copies("1×1 strided", "last", torch.float32) == []
    assert copies("2d", "last") == copies("1×1", "g last") == [c]
    assert copies("1×1", "first", torch.float32) == copies("1×1, odd", "first") == [c, o]
    assert copies("1×1", "last", torch.float32, tf32=True) == [c, o]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("fourths", [False, True])
def test_blocks_that_are_chosen(dtype, fourths):
    problem = PROBLEMS["2d in 2 groups"]
    x, g = data(problem, dtype)
    squares, powers = sums_like(problem), sums_like(problem) if fourths else None
    add_squares(x, g, squares, powers, problem.windows)
    assert close(squares, 2 + truth(problem, x, g).square().sum(0), 1e-3)


@pytest.mark.parametrize("fourths", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_fit_the_weight(dtype, fourths):
    """As measured: in 16 bits, wide tiles for wide 1×1 layers, small ones for others; not larger than the weight."""
    wide, stem, narrow = (
        convolution_tiles(outs, width, 28**2, 64, 1, dtype, fourths)
        for outs, width in ((256, 9 * 256), (64, 49 * 4), (24, 144))
    )
    if dtype == torch.bfloat16:
        assert convolution_tiles(256, 9 * 256, 28**2, 64, 1, dtype, fourths, pointwise=False)[:3] == (64, 64, 128)
        assert convolution_tiles(512, 9 * 512, 7**2, 64, 1, dtype, fourths, pointwise=False)[:3] == (64, 64, 64)
    sides = (64, 64) if dtype == torch.float32 else (128, 64) if fourths else (128, 128)
    assert (wide.block_o, wide.block_i) == sides
    assert stem.block_o == 64
    assert narrow.block_o <= 64


@pytest.mark.parametrize("name", ["2d in 2 groups", "1×1", "1×1 strided", "2d uneven"])
@pytest.mark.parametrize("fourths", [False, True])
def test_scaled_operands_have_11_bits(name, fourths):
    """Magnitudes that float16 has no room for, different in each channel of each sample."""
    problem = PROBLEMS[name]
    x, g = data(problem)
    x, g = (_uneven(values) for values in (x, g))
    squares, powers = (torch.zeros_like(sums_like(problem)) for _ in range(2))
    options = {"factors": (1.0, 1.0, 1e-3), "config": SMALL, "tf32": True}
    add_squares(x, g, squares, powers if fourths else None, problem.windows, **options)
    G = 1e-3 * truth(problem, rounded(x), rounded(g))
    assert (squares / G.square().sum(0) - 1).abs().max() < 1e-3  # each cell, of whatever size: products are exact
    assert not fourths or close(powers, G.pow(4).sum(0))
    assert close(squares, (1e-3 * truth(problem, x, g)).square().sum(0), 2e-3)  # and rounding loses little


def rounded(values: Tensor) -> Tensor:
    """To 11 bits."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def _uneven(values: Tensor) -> Tensor:
    """Each channel of each sample with a magnitude of its own, from 10⁻⁵ to 10⁵."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** torch.empty(values.shape[:2]).uniform_(-5, 5, generator=generator)
    return values * size.view(*values.shape[:2], *(1,) * (values.ndim - 2))


@pytest.mark.filterwarnings("ignore:invalid value")  # in rows beyond the edge, which are not used
def test_non_finite_values_stay_in_their_sums():
    problem = PROBLEMS["2d"]
    x, g = data(problem)
    x[1, 2, 3, 3] = torch.inf
    squares = sums_like(problem)
    add_squares(x, g, squares, None, problem.windows, config=SMALL)
    hit = torch.zeros(problem.weight[1:]).bool()
    hit[2] = True  # the only channel that has seen it
    assert torch.equal(squares.isfinite().view(problem.weight), ~hit.expand(problem.weight))


def test_nothing_comes_of_no_samples():
    problem = PROBLEMS["2d"]
    x, g = (values[:0] for values in data(problem))
    squares = sums_like(problem)
    add_squares(x, g, squares, None, problem.windows)
    assert (squares == 2).all()
    problem = DEPTHWISE["3×3"]
    x, g = (values[:0] for values in data(problem))
    assert depthwise.gradients(x, g, problem.windows).shape == (0, 4, 9)


@pytest.mark.parametrize(
    "change",
    [
        {"windows": PROBLEMS["2d"].windows._replace(kernel=(5, 5))},
        {"windows": PROBLEMS["2d"].windows._replace(padding=(0, 1))},
        {"config": ConvolutionTiles(16, 16, 512, 4, 2)},
        {"squares": torch.zeros(18, 36, dtype=torch.float64)},
        {"squares": torch.zeros(36, 18).T},
        {"g": torch.zeros(5, 18, 5, 5, dtype=torch.float64)},
        {"g": torch.zeros(4, 18, 5, 5)},
    ],
    ids=str,
)
def test_what_would_be_misread_is_refused(change):
    x, g = data(PROBLEMS["2d"])
    arguments = {"x": x, "g": g, "squares": sums_like(PROBLEMS["2d"]), "fourths": None}
    arguments |= {"windows": PROBLEMS["2d"].windows} | change
    with pytest.raises(ValueError, match=r"float32|same samples|windows|block_t"):
        add_squares(**arguments)


@pytest.mark.parametrize("problem", DEPTHWISE.values(), ids=DEPTHWISE)
@pytest.mark.parametrize("by_taps", [None, False, True])
def test_depthwise_gradients(problem, by_taps):
    x, g = data(problem)
    config = None if by_taps is None else depthwise.DepthwiseTiles(16, 8 if by_taps else 7, by_taps, 1)
    found = depthwise.gradients(x, g, problem.windows, config)
    G = truth(problem, x, g)
    assert found.dtype == torch.float32
    assert close(found, G)
    if len(x) > 1:
        assert not close(found.square().sum(0), G.sum(0).square(), 0.1)


@pytest.mark.parametrize("dtype", HALF)
def test_depthwise_gradients_of_half_precision(dtype):
    problem = DEPTHWISE["3×3"]
    x, g = data(problem, dtype)
    found = depthwise.gradients(x, g, problem.windows)
    assert close(found, truth(problem, x, g))


def test_depthwise_refuses_windows_that_leave_the_image():
    problem = DEPTHWISE["3×3"]
    x, g = data(problem)
    with pytest.raises(ValueError, match="windows"):
        depthwise.gradients(x, g, problem.windows._replace(padding=(0, 0)))


FORMS = {
    "transposed": ((4, 6, 3, 3), {"stride": (2, 1), "padding": (1, 0), "transposed": True}, (5, 4), (10, 6)),
    "transposed in 2 groups": ((4, 3, 2, 3), {"transposed": True, "groups": 2}, (4, 3), (5, 5)),
    "strided in 2 groups": ((6, 2, 3, 3), {"stride": (2, 2), "padding": (1, 1), "groups": 2}, (5, 6), (3, 3)),
    "1×1 strided": ((6, 4, 1, 1), {"stride": (2, 2)}, (5, 6), (3, 3)),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_rule_hands_over_what_the_kernel_expects(name, channels_last, monkeypatch):
    """Kernel against torch's weight gradients; one row for each sample, [n, 1, c, *space]."""
    weight, options, space, out = FORMS[name]
    rest = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "transposed": False, "groups": 1} | options
    outs = weight[1] * rest["groups"] if rest["transposed"] else weight[0]
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, c, *size, generator=generator) for c, size in ((4, space), (outs, out)))
    x, g = (last(x), last(g)) if channels_last else (x, g)
    form = Convolution(x[:, None], g[:, None], torch.Size(weight), **rest)
    G = form.gradients(0, 2, torch.float64)
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "interpret")
    monkeypatch.setattr(dispatch, "tf32_convolutions", lambda: False)
    squares, fourths = torch.zeros(weight), torch.zeros(weight)
    form.add_squares(PowerSums(squares, fourths, unit=2.0, weight=3.0, scale=0.5))
    assert close(squares, (G / 0.5).square().sum(0))
    assert close(fourths, 3 * G.pow(4).sum(0))
