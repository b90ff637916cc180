"""Every rule against the definition: one backward pass of autograd for each sample, in float64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample import gradients as forms
from neuromanifold.persample.gradients import Dense, Form, PowerSums, Product, Rows, SquaredProduct
from neuromanifold.persample.rules import Call, NotApplicableError, find_rule
from neuromanifold.persample.rules.convolution import Convolution
from neuromanifold.persample.rules.scales import norm_like
from tests.persample.layers import LAYERS

TIGHT = 1e-10
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def close(found: Tensor, expected: Tensor, rtol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 100)


def definition(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """∂⟨y_n, g_n⟩/∂θ, sample after sample: [n, *shape] for each parameter."""
    named = dict(module.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for n in range(len(x)):
        extra = (1,) * (x.ndim - 1 - _dims(module)) if x.is_floating_point() else ()
        one = x[n : n + 1] if not extra else x[n]  # convolutions take one dimension for samples, and no more
        found = torch.autograd.grad(module(one), list(named.values()), g[n : n + 1] if not extra else g[n])
        for name, gradient in zip(named, found, strict=True):
            rows[name].append(gradient.to_dense())
    return {
        name: torch.stack(row) if row else named[name].new_zeros(0, *named[name].shape) for name, row in rows.items()
    }


def _dims(module: nn.Module) -> int:
    """How many dimensions an input without samples has; for most modules that does not matter."""
    return 1 + len(module.kernel_size) if isinstance(module, nn.modules.conv._ConvNd) else 10**6


def output_gradient(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x if x.ndim - 1 <= _dims(module) else x.flatten(0, -_dims(module) - 1))
    y = y if y.shape[0] == x.shape[0] else y.unflatten(0, x.shape[: x.ndim - _dims(module)])
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)


def by_rule(module: nn.Module, x: Tensor, g: Tensor, wanted: set[str] | None = None) -> dict[str, Form]:
    rule = find_rule(module)
    assert rule is not None
    names = {name for name, _ in module.named_parameters()} if wanted is None else wanted
    found = rule.function(Call(module, x, (), {}, g, frozenset(names)))
    assert names <= set(found)
    return {name: found[name] for name in names}


def assert_form(form: Form, expected: Tensor, rtol: float = TIGHT) -> None:
    """All that a form can do, against the gradients [n, *shape] themselves."""
    samples = len(expected)
    assert (form.samples, tuple(form.shape)) == (samples, tuple(expected.shape[1:]))
    close(form.gradients(0, samples, torch.float64), expected, rtol)
    if samples > 1:
        close(form.gradients(1, samples - 1, torch.float64), expected[1:-1], rtol)
    norms = expected.flatten(1).square().sum(1)
    close(form.squared_norms(torch.float64), norms, rtol)
    close(form.squared_norms(torch.float32).double(), norms, max(rtol, 1e-5))
    assert_squares(form.add_squares, expected, rtol)


def assert_squares(add: Callable[[PowerSums], None], expected: Tensor, rtol: float = TIGHT) -> None:
    """Σ g², on top of what is there; and Σ g⁴ in units, with a weight and a scale."""
    alone = torch.full(expected.shape[1:], 2.0, dtype=torch.float64)
    add(PowerSums(alone))
    close(alone, 2 + expected.square().sum(0), rtol)
    squares, fourths = torch.full_like(alone, 2.0), torch.full_like(alone, 3.0)
    add(PowerSums(squares, fourths, unit=0.5, weight=0.7, scale=4.0))
    close(squares, 2 + (expected / 4).square().sum(0), rtol)
    close(fourths, 3 + 0.7 * (expected / 4 / 0.5).pow(4).sum(0), rtol)


@pytest.mark.parametrize("samples", [0, 1, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_rules_equal_the_definition(name: str, samples: int) -> None:
    module, x = LAYERS[name].module(), LAYERS[name].input(samples)
    before = dict(module._parameters)
    try:
        g = output_gradient(module, x)
    except (RuntimeError, ValueError, IndexError):
        assert samples == 0  # the module itself takes no empty batches
        return
    expected = definition(module, x, g)
    for key, form in by_rule(module, x, g).items():
        assert_form(form, expected[key], LAYERS[name].rtol)
    assert all(module._parameters[key] is value for key, value in before.items())


@pytest.mark.parametrize("tile", [1, 7, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_tiles_of_any_size_give_the_same(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms.forms, "CPU_TILE", tile)
    module, x = LAYERS[name].module(), LAYERS[name].input(3)
    g = output_gradient(module, x)
    expected = definition(module, x, g)
    for key, form in by_rule(module, x, g).items():
        assert_form(form, expected[key], LAYERS[name].rtol)


@pytest.mark.parametrize("name", LAYERS)
def test_only_what_is_wanted_is_given(name: str) -> None:
    module, x = LAYERS[name].module(), LAYERS[name].input(3)
    g = output_gradient(module, x)
    expected = definition(module, x, g)
    for key in expected:
        assert_form(by_rule(module, x, g, {key})[key], expected[key], LAYERS[name].rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    """float32 to 1e-5 of the norm; of half precision only what its inputs have lost is lost."""
    module, x = LAYERS[name].module(), LAYERS[name].input(4)
    g = output_gradient(module, x).to(dtype)
    module, x = module.to(dtype), x.to(dtype) if x.is_floating_point() else x
    exact, same = LAYERS[name].module(), x.double() if x.is_floating_point() else x
    for one, other in zip(exact.parameters(), module.parameters(), strict=True):
        one.data.copy_(other.data)
    for one, other in zip(exact.buffers(), module.buffers(), strict=True):
        one.data.copy_(other.data)
    expected = definition(exact, same, g.double())
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for key, form in by_rule(module, x, g).items():
        to = PowerSums(torch.zeros(form.shape), torch.zeros(form.shape))
        form.add_squares(to)
        assert to.squares.dtype == torch.float32
        for found, power in ((to.squares, 2), (to.fourths, 4)):
            truth = expected[key].pow(power).sum(0)
            assert torch.linalg.vector_norm(found - truth) <= limit * torch.linalg.vector_norm(truth) + 1e-30


@pytest.mark.parametrize("name", [n for n in LAYERS if "Embedding" not in n])
def test_large_float16_gradients_do_not_overflow(name: str) -> None:
    """Cotangents are scaled up until something overflows in the backward pass: products and sums must not."""
    module, x = LAYERS[name].module().half(), LAYERS[name].input(4).half()
    g = torch.full_like(output_gradient(module.float(), x.float()), 3e4).half()
    for form in by_rule(module.half(), x, g).values():
        assert torch.isfinite(form.gradients(0, 4, torch.float32)).all()


# ---------------------------------------------------------------------------------------------- odd shapes, any options

few = st.integers(1, 3)


@given(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=3), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_linear_on_odd_shapes(samples: int, dims: list[int], ins: int, outs: int, bias: bool) -> None:
    module = nn.Linear(ins, outs, bias).double()
    x = torch.randn(samples, *dims, ins, dtype=torch.float64)
    g = output_gradient(module, x)
    expected = definition(module, x, g)
    for key, form in by_rule(module, x, g).items():
        assert_form(form, expected[key])


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """Any convolution that torch itself accepts."""
    dims, transposed, groups = draw(few), draw(st.booleans()), draw(few)
    each = lambda low, high: [draw(st.integers(low, high)) for _ in range(dims)]  # noqa: E731
    kernel, stride, dilation, padding = each(1, 3), each(1, 3), each(1, 2), each(0, 2)
    ins, outs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    options = {
        "stride": stride,
        "dilation": dilation,
        "padding": padding,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    if transposed:
        options["output_padding"] = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        kinds = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
    else:
        kinds = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
        options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        if draw(st.booleans()):
            options |= {"padding": draw(st.sampled_from(["same", "valid"])), "stride": 1}
    size = [draw(st.integers(5, 6)) for _ in range(dims)] if dims < 3 else [5, 6, 5]
    module = kinds[dims - 1](ins, outs, kernel, **options).double()
    return module, torch.randn(draw(st.integers(1, 3)), ins, *size, dtype=torch.float64)


@given(convolutions())
def test_convolutions_with_any_options(problem: tuple[nn.Module, Tensor]) -> None:
    module, x = problem
    try:
        g = output_gradient(module, x)
    except RuntimeError:
        return  # torch says that the output would be too small
    expected = definition(module, x, g)
    for key, form in by_rule(module, x, g).items():
        assert_form(form, expected[key])
        if isinstance(form, Convolution) and form.groups == 1:
            written = form._product(0, len(x))
            assert_form(written, expected[key])
            matrix = torch.randn(written.right.shape[-1], 3, dtype=torch.float64)
            for constant in (None, torch.randn(3, dtype=torch.float64)):
                found = form.product_with(0, len(x), matrix, constant)
                assert found is not None
                turned = written.right @ matrix + (0 if constant is None else constant)
                torch.testing.assert_close((found.left, found.right), (written.left, turned))


@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_embeddings_on_odd_shapes(samples: int, length: int, rows: int, dim: int, padded: bool) -> None:
    module = nn.Embedding(rows, dim, padding_idx=0 if padded else None).double()
    ids = torch.randint(0, rows, (samples, length))
    g = output_gradient(module, ids)
    assert_form(by_rule(module, ids, g)["weight"], definition(module, ids, g)["weight"])


@pytest.mark.parametrize("tile", [1, 64, 2**18])
@pytest.mark.parametrize("name", [n for n in LAYERS if n.startswith(("Conv1d", "Conv2d", "Conv3d", "ConvTr"))])
def test_windows_of_a_convolution_written_out(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done on a GPU, here on a CPU."""
    monkeypatch.setattr(forms.forms, "CPU_TILE", tile)
    module, x = LAYERS[name].module(), LAYERS[name].input(4)
    g = output_gradient(module, x)
    expected = definition(module, x, g)["weight"]
    form = by_rule(module, x, g)["weight"]
    assert isinstance(form, Convolution)
    if form.groups > 1:
        return
    pieces = list(form.product_pieces())
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == 4
    for start, stop in pieces:
        torch.testing.assert_close(
            form._product(start, stop).gradients(0, stop - start, torch.float64), expected[start:stop]
        )
    assert_squares(lambda to: [form._product(*piece).add_squares(to) for piece in pieces], expected)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- sums of forms


def _some_forms() -> dict[str, Form]:
    """Gradients of three samples with respect to one table [4, 2], in every form."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    convolution = Convolution(random(3, 1, 2, 5), random(3, 1, 4, 5), torch.Size((4, 2, 1)), (1,), (0,), (1,), False, 1)
    return {
        "dense": Dense(random(3, 4, 2)),
        "product": Product(random(3, 5, 4), random(3, 5, 2)),
        "product of one position": Product(random(3, 1, 4), random(3, 1, 2)),
        "rows": Rows(random(3, 6, 2), torch.randint(0, 4, (3, 6), generator=draw), 4),
        "rows, few": Rows(random(3, 1, 2), torch.randint(0, 4, (3, 1), generator=draw), 4),
        "convolution 1x1": convolution,
        "grouped": Product(random(3, 2, 5, 2), random(3, 2, 5, 2), torch.Size((4, 2))),
    }


@pytest.mark.parametrize("tile", [1, 7, 2**18])
@pytest.mark.parametrize("second", _some_forms())
@pytest.mark.parametrize("first", _some_forms())
def test_sums_of_forms(first: str, second: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms.forms, "CPU_TILE", tile)
    some, others = _some_forms(), _some_forms()
    parts = [some[first], others[second]]
    if isinstance(parts[0], Convolution) and not isinstance(parts[1], Convolution):
        parts.reverse()  # a parameter has one shape
    expected = sum(part.gradients(0, 3, torch.float64).view(3, *parts[0].shape) for part in parts)
    assert_form(forms.add(parts), expected)  # type: ignore[arg-type]
    assert_form(forms.add([*parts, parts[0]]), expected + parts[0].gradients(0, 3, torch.float64))  # type: ignore[arg-type]
    assert forms.add(parts[:1]) is parts[0]


def test_sums_of_different_precision() -> None:
    for kind in ("dense", "product", "rows"):
        form = _some_forms()[kind]
        half = {
            "dense": lambda f: Dense(f.values.half()),
            "product": lambda f: Product(f.left.half(), f.right.half()),
            "rows": lambda f: Rows(f.values.half(), f.ids, 4),
        }[kind](form)
        expected = sum(f.gradients(0, 3, torch.float64) for f in (form, half))
        torch.testing.assert_close(forms.add([form, half]).gradients(0, 3, torch.float64), expected)


@pytest.mark.parametrize("stacked", [False, True])
def test_cotangents_of_a_product_are_added_before_they_are_multiplied(stacked: bool) -> None:
    right = torch.randn(3, 2, dtype=torch.float64)
    lefts = torch.randn(4, 3, 5, dtype=torch.float64)
    lefts[1] *= 1e3
    total = SquaredProduct.of(Product(lefts[0][:, None], right[:, None]), torch.float64)
    if stacked:
        total.add_cotangents(8 * lefts, scale=8.0, weight=0.25)
    else:
        for left in lefts:
            total.add_cotangents(8 * left, scale=8.0, weight=0.25)
    gradients = lefts[..., None] * right[None, :, None, :]
    squares, fourths = torch.zeros(5, 2, dtype=torch.float64), torch.zeros(5, 2, dtype=torch.float64)
    total.add_squares(PowerSums(squares, fourths, unit=0.5))
    assert torch.allclose(squares, gradients.square().sum((0, 1)), rtol=TIGHT, atol=0)
    assert torch.allclose(fourths, 0.25 * (gradients / 0.5).pow(4).sum((0, 1)), rtol=TIGHT, atol=0)


@pytest.mark.parametrize("name", _some_forms())
def test_magnitudes_are_about_right(name: str) -> None:
    form = _some_forms()[name]
    rms = form.gradients(0, 3, torch.float64).square().mean().sqrt()
    assert 0.1 < float(form.magnitude() / rms) < 10


# --------------------------------------------------------------------------------------------- which modules have one


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class NewName(nn.Linear):
    pass


class OneMore(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(1))


def _patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x @ module.weight  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "rows"), [(2, 1), (4, 2)])
def test_groups_can_be_done_as_samples_of_their_own(transposed: bool, groups: int, rows: int) -> None:
    """As a GPU does it, where torch's own is slow for many groups."""
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    layer = kind(8, 12, 3, stride=2, padding=1, groups=groups, bias=False).double()
    x = torch.randn(3, rows, 8, 9, dtype=torch.float64)
    g = torch.randn_like(layer(x.flatten(0, 1)).unflatten(0, (3, rows)))
    form = Convolution(x, g, layer.weight.shape, (2,), (1,), (1,), transposed, groups)
    apart = form._groups_as_samples(0, 3)
    found = apart._product(0, apart.samples).gradients(0, apart.samples, torch.float64).view(3, *form.shape)
    torch.testing.assert_close(found, form.gradients(0, 3, torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "has"),
    [
        (NewName(2, 2), True),
        (nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2), True),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), True),
        (OwnForward(2, 2), False),
        (OneMore(), False),
        (_patched(), False),
        (nn.Bilinear(2, 2, 2), False),
        (nn.BatchNorm1d(2, track_running_stats=False), False),
        (nn.LayerNorm(2, elementwise_affine=False), False),
        (nn.LSTM(2, 2), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_modules_have_a_rule(module: nn.Module, has: bool) -> None:
    assert (find_rule(module) is not None) == has


class BiasFirstNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3).double()), nn.Parameter(torch.zeros(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / x.norm(dim=-1, keepdim=True) + self.bias)


class SquaredRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.square() * x


@pytest.mark.parametrize("module", [BiasFirstNorm(), SquaredRMSNorm()], ids=lambda m: type(m).__name__)
def test_a_norm_that_is_something_else_is_refused(module: nn.Module) -> None:
    """Though their weights are one and their biases zero, where the difference does not show."""
    x = torch.randn(4, 3, dtype=torch.float64)
    before = dict(module._parameters)
    with pytest.raises(NotApplicableError):
        norm_like(Call(module, x, (), {}, x, frozenset({"weight"})))
    assert all(module._parameters[key] is value for key, value in before.items())


class _Noise(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.rand(())


def test_a_weight_that_is_random_has_no_rule() -> None:
    """What it was in the forward pass is not known later."""
    layer = nn.Linear(3, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", _Noise(), unsafe=True)
    data = [torch.randn(5, 3) for _ in range(2)]
    ways = nm.fisher_diagonal(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)), data).provenance.granularity
    assert ways["0.parametrizations.weight.original"] == "batch"


def test_a_weight_that_torch_keeps_has_its_gradient_afterwards() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(5, 3)
    expected = nm.fisher_diagonal(model, [x, x], nm.Exact())
    with nn.utils.parametrize.cached():
        before = model[0].weight
        found = nm.fisher_diagonal(model, [x, x], nm.Exact())
        assert model[0].weight is before
        model(x).sum().backward()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(parameter.grad is not None for parameter in model.parameters())
