"""The C kernel against the obvious sums in float64, and what happens where it cannot be had."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from neuromanifold.kernels import dispatch
from neuromanifold.kernels.c import build, square
from neuromanifold.persample.gradients import BOUND, PowerSums, Product
from neuromanifold.persample.rules.convolution import Convolution
from tests import forked

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
PLAIN = ("cc",)
# Other processors' tiles, as far as this one can run them: 8 numbers at a time, and 4.
NARROW = (("cc", "-mno-avx512f"), ("cc", "-mno-avx512f", "-mno-avx2", "-mno-avx"))
SHAPES = [  # n, t, o, i
    (5, 7, 20, 33),
    (1, 16, 16, 32),
    (3, 1, 25, 64),
    (2, 40, 17, 70),
    (2, 600, 9, 40),
    (9, 2, 300, 40),
    (4, 129, 130, 600),
]


@pytest.fixture(autouse=True)
def native(monkeypatch, tmp_path_factory):
    """Shapes of any size, and a cache of the tests' own."""
    monkeypatch.setattr(dispatch, "_LEAST", 1)
    monkeypatch.setattr(square, "_FILLED", 0.0)
    monkeypatch.setattr(square, "_OF_A_GROUP", 1)
    square._blocks.cache_clear()
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("NEUROMANIFOLD_KERNELS", raising=False)
    monkeypatch.delenv("CC", raising=False)
    forget = build._library.cache_clear
    forget()
    yield
    forget()
    square._blocks.cache_clear()


def library() -> object:
    return build.kernel(square.SOURCE, "add_squares")


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def accumulators(*shape: int, **options: float) -> PowerSums:
    return PowerSums(torch.ones(*shape), torch.ones(*shape), **options)


def products(left: Tensor, right: Tensor) -> Tensor:
    return torch.einsum("...to,...ti->...oi", left.double(), right.double())


def close(found: Tensor | None, expected: Tensor, tolerance: float = 1e-6) -> bool:
    assert found is not None
    return float((found.double() - expected).norm()) <= tolerance * float(expected.norm())


def is_right(to: PowerSums, gradients: Tensor) -> bool:
    """Sums that began with ones, of gradients in float64."""
    shape = to.squares.shape
    truth = gradients / to.scale
    squares, fourths = truth.square().sum(0).view(shape), (truth / to.unit).pow(4).sum(0).view(shape)
    return close(to.squares, 1 + squares) and close(to.fourths, 1 + to.weight * fourths, 3e-6)


@needs_compiler
@pytest.mark.parametrize("compiler", [PLAIN, *NARROW], ids=["own", "half", "quarter"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_squared_sample_by_sample(shape, compiler, monkeypatch):
    if compiler != PLAIN:
        if os.uname().machine != "x86_64":
            pytest.skip("flags of another processor")
        monkeypatch.setenv("CC", " ".join(compiler))
    n, t, o, i = shape
    left, right, to = noise(n, t, o), noise(n, t, i), accumulators(o, i, unit=4.0, weight=0.5, scale=2.0)
    assert square.call_product_squares(left, right, to)
    assert is_right(to, products(left, right))
    if n > 1:
        assert not close(to.squares, 1 + products(left, right).sum(0).square() / 4, 0.1)  # the batch's square


@needs_compiler
def test_without_fourth_powers():
    left, right, squares = noise(5, 70, 18), noise(5, 70, 30), torch.zeros(18, 30)
    for _ in range(2):
        assert square.call_product_squares(left, right, PowerSums(squares, scale=0.5))
    assert close(squares, 2 * 4 * products(left, right).square().sum(0))


@needs_compiler
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (noise(20, 4, 18).transpose(0, 1), noise(1, 20, 30).expand(4, 20, 30)),
        (noise(4, 18, 20).mT, noise(4, 30, 20).mT),
        (noise(4, 20, 1).expand(4, 20, 18), noise(4, 20, 1).expand(4, 20, 30)),
        (noise(4, 40, 36)[:, ::2, ::2], noise(4, 40, 90)[:, 1::2, ::3]),
    ],
    ids=["samples second", "turned", "all the same", "every other"],
)
def test_any_strides(left, right):
    to = accumulators(18, 30)
    assert square.call_product_squares(left, right, to)
    assert is_right(to, products(left, right))


@needs_compiler
def test_groups_of_products():
    left, right, to = noise(3, 4, 10, 12), noise(3, 4, 10, 20), accumulators(48, 20)
    assert square.call_product_squares(left, right, to)
    assert is_right(to, products(left, right))


@needs_compiler
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_gradients_of_any_size_in_their_unit(size):
    left, right = noise(4, 20, 18) * size, noise(4, 20, 30)
    unit = 2.0 ** round(torch.tensor(size * 20**0.5).log2().item())
    to = PowerSums(torch.zeros(18, 30), torch.zeros(18, 30), unit=unit if size < 1 else 1.0, weight=1.0)
    assert square.call_product_squares(left, right, to)
    truth = products(left, right)
    if size > 1e-20:  # else squares are below all that float32 has
        assert close(to.squares, truth.square().sum(0))
    squares = (truth / to.unit).square()
    assert close(to.fourths, squares.clamp(max=BOUND).square().sum(0), 1e-5)


@needs_compiler
def test_nan_and_infinity_stay_where_they_are():
    left, right, to = noise(3, 20, 18), noise(3, 20, 30), accumulators(18, 30)
    left[1, 5, 7], left[2, 3, 9] = torch.nan, torch.inf
    assert square.call_product_squares(left, right, to)
    assert to.fourths is not None
    assert to.squares[7].isnan().all()
    assert to.fourths[7].isnan().all()
    assert not to.squares[9].isfinite().any()
    rest = [o for o in range(18) if o not in (7, 9)]
    truth = products(left[..., rest], right)
    assert close(to.squares[rest], 1 + truth.square().sum(0))


@needs_compiler
def test_sums_do_not_depend_on_the_number_of_threads():
    left, right, found = noise(6, 300, 50), noise(6, 300, 90), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            to = accumulators(50, 90)
            assert square.call_product_squares(left, right, to)
            found.append(to)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for to in found[1:] for a, b in zip(to[:2], found[0][:2], strict=True))


@needs_compiler
@pytest.mark.parametrize(
    ("module", "space"),
    [
        (nn.Conv2d(3, 8, 3, 2, 1), (9, 12)),
        (nn.Conv2d(40, 12, 3, padding=2, dilation=2), (8, 7)),
        (nn.Conv2d(70, 9, (1, 4), (2, 1), (0, 3)), (6, 5)),
        (nn.Conv2d(33, 10, 1, 2, bias=False), (7, 9)),
        (nn.Conv2d(5, 10, 1, padding=1), (3, 4)),
        (nn.Conv2d(12, 24, 3, groups=4), (6, 6)),
        (nn.Conv1d(6, 20, 5, 3, 2), (700,)),
        (nn.Conv3d(2, 9, 2, (1, 2, 1), 1), (4, 5, 3)),
        (nn.ConvTranspose2d(12, 7, 3, 2, 1, 1), (5, 4)),
        (nn.ConvTranspose1d(12, 18, 4, 2, 0, 1, 3, dilation=2), (9,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["plain", "channels last", "rows"])
def test_convolutions(module, space, kind):
    n, m = 3, 2 if kind == "rows" else 1
    x = noise(n * m, module.in_channels, *space)
    g = noise(*module(x).shape)
    if kind == "channels last":
        x, g = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g))
    x, g = (t.unflatten(0, (n, m)) for t in (x, g))
    options = (module.stride, module.padding, module.dilation, module.transposed, module.groups)
    form = Convolution(x, g, module.weight.shape, *options)
    to = accumulators(*module.weight.shape, unit=8.0, weight=0.5, scale=2.0)
    assert dispatch.add_squares_of_convolution(form.slid, form.fixed, to, form.windows)
    assert is_right(to, Convolution(x.double(), g.double(), form.shape, *options).gradients(0, n, torch.float64))


@needs_compiler
def test_forms_use_it_and_agree_with_torch(monkeypatch):
    left, right = noise(4, 30, 64), noise(4, 30, 96)
    done = []
    monkeypatch.setattr(square, "_call", lambda *args, run=square._call: done.append(run(*args)) or done[-1])
    natively, by_torch = accumulators(64, 96, unit=4.0), accumulators(64, 96, unit=4.0)
    Product(left, right).add_squares(natively)
    assert done == [True]
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "0")
    Product(left, right).add_squares(by_torch)
    assert done == [True]
    assert close(natively.squares, by_torch.squares.double())
    assert close(natively.fourths, by_torch.fourths.double())


@needs_compiler
def test_what_it_does_not_take(monkeypatch):
    left, right = noise(4, 30, 64), noise(4, 30, 96)
    double = PowerSums(torch.zeros(64, 96, dtype=torch.float64))
    assert not square.call_product_squares(left.double(), right.double(), double)
    assert not square.call_product_squares(left, right, PowerSums(torch.zeros(96, 64).T))
    assert not dispatch.add_squares_of_products(left[:0], right[:0], accumulators(64, 96))
    monkeypatch.setattr(square, "_FILLED", 0.25)
    square._blocks.cache_clear()
    assert not square.call_product_squares(left[..., :1], right[..., :9], accumulators(1, 9))
    monkeypatch.setattr(build, "parallel", lambda: None)
    assert square.call_product_squares(left, right, accumulators(64, 96))  # alone it needs no other threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not square.call_product_squares(left, right, accumulators(64, 96))


def squares_of_a_product() -> bool:
    left, right, to = noise(4, 30, 64), noise(4, 30, 96), accumulators(64, 96)
    Product(left, right).add_squares(to)
    return is_right(to, products(left, right))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "true", "cc --no-such-flag", "'"])
def test_torch_does_it_where_compiling_fails(compiler, monkeypatch, capfd):
    monkeypatch.setenv("CC", compiler)
    assert library() is None
    assert squares_of_a_product()
    assert capfd.readouterr() == ("", "")


@needs_compiler
def test_many_positions_lose_no_accuracy():
    """Of one sign, so that sums grow: added in one go, 300,000 of them would be off by 4e-5."""
    left, right = noise(1, 300_000, 16).abs(), noise(1, 300_000, 32).abs()
    to = accumulators(16, 32)
    assert square.call_product_squares(left, right, to)
    assert close(to.squares, products(left, right).square().sum(0), 5e-6)


@needs_compiler
def test_torch_does_it_if_kernels_are_unwanted(monkeypatch):
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "0")
    monkeypatch.setattr(build, "kernel", lambda *_: pytest.fail("is not even looked for"))
    assert squares_of_a_product()


@needs_compiler
@pytest.mark.parametrize("place", ["a file", "nowhere"])
def test_a_cache_that_cannot_be_written_to(place, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if place == "a file" else "/proc/nowhere")
    assert library() is not None
    assert squares_of_a_product()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def processes_that_build(count: int, cache: Path) -> list[Path]:
    """Several at once, without a word; the libraries that are in the cache then, each with its digest."""

    def build_it() -> None:
        os.environ["XDG_CACHE_HOME"] = str(cache)
        build._library.cache_clear()
        assert build.kernel(square.SOURCE, "add_squares") is not None

    with tempfile.TemporaryFile("w+") as said:
        running = [forked.start(build_it, said, said) for _ in range(count)]
        codes = [forked.returncode(process) for process in running]
        said.seek(0)
        assert (said.read(), codes) == ("", [0] * count)
    found = sorted((cache / "neuromanifold").iterdir())
    libraries = [path for path in found if path.suffix == ".so"]
    assert found == sorted([*libraries, *(path.with_suffix(".digest") for path in libraries)])
    return libraries


@needs_compiler
def test_processes_that_build_at_once_leave_one_file_and_a_broken_one_is_replaced(tmp_path):
    (kept,) = processes_that_build(3, tmp_path)
    size = kept.stat().st_size
    kept.write_bytes(b"not a library")
    assert processes_that_build(1, tmp_path) == [kept]
    assert kept.stat().st_size == size


@needs_compiler
@pytest.mark.parametrize(
    "part", [pytest.param(0.1, marks=pytest.mark.slow), 0.5, pytest.param(0.9, marks=pytest.mark.slow)]
)
def test_a_part_of_a_library_is_replaced(part, tmp_path):
    """As a full disk or a lost machine may leave it; loading it would end the process."""
    (kept,) = processes_that_build(1, tmp_path)
    whole = kept.read_bytes()
    kept.write_bytes(whole[: int(part * len(whole))])
    assert processes_that_build(1, tmp_path) == [kept]
    assert kept.read_bytes() == whole
    kept.with_suffix(".digest").write_bytes(b"\xff\xfe")
    assert processes_that_build(1, tmp_path) == [kept]


@needs_compiler
def test_the_source_has_no_warnings(tmp_path):
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Werror", "-O3"]
    subprocess.run(["cc", *warnings, "-shared", "-fPIC", "-o", tmp_path / "a.so", square.SOURCE], check=True)
