"""`nm.check_rule` passes the rules that there are, and sees every mistake that a rule's author can make."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.gradients import Dense, Form, Product
from neuromanifold.persample.rules import Call, NotApplicableError, find_rule
from neuromanifold.persample.rules.registry import known_rules


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(0))


GOOD = {
    "linear": (nn.Linear(5, 3), randn(4, 5)),
    "linear with positions": (nn.Linear(5, 3), randn(4, 2, 3, 5)),
    "linear without bias": (nn.Linear(1, 3, bias=False), randn(3, 1)),
    "conv 1d, grouped, circular": (nn.Conv1d(4, 6, 3, groups=2, padding=1, padding_mode="circular"), randn(4, 4, 7)),
    "conv 2d": (nn.Conv2d(2, 3, (3, 2), stride=2, dilation=(1, 2), padding="valid"), randn(4, 2, 5, 6)),
    "conv transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), randn(3, 2, 4, 5)),
    "embedding": (nn.Embedding(7, 4, padding_idx=0), ids(4, 5)),
    "embedding of one id": (nn.Embedding(7, 4), ids(4)),
    "layer norm": (nn.LayerNorm((3, 5)), randn(4, 2, 3, 5)),
    "RMS norm": (nn.RMSNorm(5), randn(4, 3, 5)),
    "group norm": (nn.GroupNorm(2, 4), randn(4, 4, 3)),
    "batch norm": (nn.BatchNorm2d(4), randn(4, 4, 2, 3)),
    "instance norm": (nn.InstanceNorm1d(4, affine=True), randn(4, 4, 5)),
    "PReLU": (nn.PReLU(), randn(4, 4, 5)),
    "PReLU by channel": (nn.PReLU(4), randn(4, 4, 5)),
}


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
def test_the_rules_that_there_are_pass(case: tuple[nn.Module, Tensor]) -> None:
    result = nm.check_rule(*case)
    assert result.passed, str(result)
    assert all(row.error < 1e-14 and row.error32 < 1e-5 for row in result.rows)
    assert ("samples in several rows" in result.cases) == find_rule(case[0]).extra_dims  # type: ignore[union-attr]


def linear(call: Call) -> dict[str, Form]:
    """The right one, for the twins below."""
    return {"weight": Product(call.g, call.x), "bias": Dense(call.g.sum(1))}


def first_position_only(call: Call) -> dict[str, Form]:
    return {**linear(call), "bias": Dense(call.g[:, 0])}


def not_summed(call: Call) -> dict[str, Form]:
    return {**linear(call), "bias": Dense(call.g)}


def tokens_as_samples(call: Call) -> dict[str, Form]:
    return {**linear(call), "weight": Product(call.g.flatten(0, 1)[:, None], call.x.flatten(0, 1)[:, None])}


class SquaresOfTokens(Dense):
    """Gradients are right, squares are those of tokens."""

    def add_squares(self, to: object) -> None:
        to.squares.add_((self.tokens * to.factor).square().sum((0, 1)), alpha=to.unit**2)  # type: ignore[attr-defined]


def squares_of_tokens(call: Call) -> dict[str, Form]:
    form = SquaresOfTokens(call.g.sum(1))
    form.tokens = call.g  # type: ignore[attr-defined]
    return {**linear(call), "bias": form}


def doubled(call: Call) -> dict[str, Form]:
    return {**linear(call), "weight": Product(2 * call.g, call.x)}


def averaged(call: Call) -> dict[str, Form]:
    return {**linear(call), "bias": Dense(call.g.sum(1) / len(call.g))}


def times_the_weight(call: Call) -> dict[str, Form]:
    return {**linear(call), "bias": Dense(call.g.sum(1) * call.module.bias)}


def missing(call: Call) -> dict[str, Form]:
    return {"weight": Product(call.g, call.x)}


def transposed(call: Call) -> dict[str, Form]:
    return {**linear(call), "weight": Product(call.x, call.g)}


def a_plain_tensor(call: Call) -> dict[str, Form]:
    return {**linear(call), "bias": call.g.sum(1)}  # type: ignore[dict-item]


def no_dict(call: Call) -> dict[str, Form]:
    return list(linear(call).values())  # type: ignore[return-value]


def input_in_place(call: Call) -> dict[str, Form]:
    call.x.mul_(1.0).add_(0.0)
    found = {"weight": Product(call.g, call.x.clone()), "bias": Dense(call.g.sum(1))}
    call.x.zero_()
    return found  # type: ignore[return-value]


def gradient_in_place(call: Call) -> dict[str, Form]:
    found = {"weight": Product(call.g.clone(), call.x), "bias": Dense(call.g.sum(1))}
    call.g.mul_(2)
    return found  # type: ignore[return-value]


def weight_in_place(call: Call) -> dict[str, Form]:
    with torch.no_grad():
        call.module.weight.add_(1)  # type: ignore[operator]
    return linear(call)


def keeps_something(call: Call) -> dict[str, Form]:
    call.module.last_input = call.x
    return linear(call)


def needs_all_wanted(call: Call) -> dict[str, Form]:
    assert len(call.wanted) == 2, "I want both"
    return linear(call)


def needs_samples(call: Call) -> dict[str, Form]:
    return {**linear(call), "bias": Dense(call.g.reshape(len(call.g), -1, 3).sum(1))}


def keeps_only_the_first_sample(call: Call) -> dict[str, Form]:
    return {**linear(call), "weight": Product(call.g[:1].expand_as(call.g), call.x)}


BROKEN: dict[Callable[[Call], dict[str, Form]], tuple[str, str]] = {  # which parameter is blamed, and how
    first_position_only: ("bias", "a batch: off by"),
    not_summed: ("bias", "gradients of shape [6, 3], it has [3]"),
    tokens_as_samples: ("weight", "gradients of 24 samples for 4 samples"),
    squares_of_tokens: ("bias", "a batch, squares: off by"),
    doubled: ("weight", "a batch: 2 times what autograd has"),
    averaged: ("bias", "a batch: 0.25 times what autograd has"),
    times_the_weight: ("bias", "a batch: off by"),
    missing: ("bias", "nothing is returned for it"),
    transposed: ("weight", "gradients of shape [5, 3], it has [3, 5]"),
    a_plain_tensor: ("bias", "a Tensor is returned, not a form such as Dense"),
    no_dict: ("", "returns a list, not a dict"),
    input_in_place: ("", "changes its input in place"),
    gradient_in_place: ("", "changes the output gradient in place"),
    weight_in_place: ("", "changes the module"),
    keeps_something: ("", "changes the module"),
    needs_all_wanted: ("weight", "only weight wanted: AssertionError: I want both (test_check_rule.py, line"),
    needs_samples: ("bias", "no sample: RuntimeError"),
    keeps_only_the_first_sample: ("weight", "a batch: off by"),
}


def layer_with(function: Callable[[Call], dict[str, Form]], extra_dims: bool = False) -> nn.Module:
    """A class of its own with this rule, so that none is spoilt for other tests."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(randn(3, 5)), nn.Parameter(randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    nm.rule(Mine, extra_dims=extra_dims)(function)
    return Mine()


def test_the_right_twin_passes() -> None:
    assert nm.check_rule(layer_with(linear), randn(4, 6, 5)).passed


@pytest.mark.parametrize("function", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_rule_is_seen(function: Callable[[Call], dict[str, Form]]) -> None:
    result = nm.check_rule(layer_with(function), randn(4, 6, 5))
    parameter, problem = BROKEN[function]
    assert not result.passed
    assert "FAILED" in str(result)
    found = {row.parameter: row.problem for row in result.rows}
    assert problem in (found[parameter] if parameter else "\n".join(result.problems)), str(result)


def test_what_is_only_wrong_inside_a_network_is_seen() -> None:
    """`linear` above takes [n, t, i] alone; a rule that says it takes more gets more."""
    result = nm.check_rule(layer_with(linear, extra_dims=True), randn(4, 6, 5))
    assert not result.passed
    assert any("samples in several rows" in row.problem or "one input" in row.problem for row in result.rows)


class Scaled(nn.Module):
    """Two arguments and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, mask: Tensor, power: int = 1) -> Tensor:
        return self.weight**power * x * mask[:, None]


@nm.rule(Scaled, parameters=("weight",))
def scaled(call: Call) -> dict[str, Form]:
    power = call.options.get("power", 1)
    return {"weight": Dense(call.g * call.x * call.others[0][:, None] * power * call.module.weight ** (power - 1))}


def test_several_arguments_and_options() -> None:
    mask = torch.tensor([1.0, 0.0, 2.0, 1.0])
    assert nm.check_rule(Scaled(), (randn(4, 5), mask)).passed
    assert nm.check_rule(Scaled(), (randn(4, 5), mask), options={"power": 3}).passed


def test_the_result_prints_as_a_table() -> None:
    lines = str(nm.check_rule(nn.Linear(5, 3), randn(4, 5))).splitlines()
    assert lines[0] == "Rule `linear` on Linear: passed"
    assert lines[1].split() == ["parameter", "relative", "error", "in", "float32", "form", "verdict"]
    assert [line.split()[0] for line in lines[3:5]] == ["weight", "bias"]
    assert lines[3].endswith("Product  ok")


def test_nothing_of_the_module_changes() -> None:
    module = nn.BatchNorm1d(4).train().requires_grad_(False)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    x = randn(4, 4)
    before, generator = x.clone(), torch.random.get_rng_state()
    assert nm.check_rule(module, x).passed
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert module.training
    assert not module.weight.requires_grad
    assert torch.equal(x, before)
    assert torch.equal(generator, torch.random.get_rng_state())


class Strange(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class WithMore(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)
        self.gain = nn.Parameter(torch.ones(3))


def test_a_module_without_a_rule_is_an_error_that_says_why_and_lists_the_known() -> None:
    with pytest.raises(ValueError, match="Bilinear has not been registered") as error:
        nm.check_rule(nn.Bilinear(2, 3, 4), randn(4, 2))
    assert all(name in str(error.value) for name in known_rules())
    assert "Linear" in known_rules()
    for module, why in {
        Strange(5, 3): "Strange has a forward of its own, other than Linear's",
        WithMore(): "the rule of Linear does not know gain",
        nn.BatchNorm1d(5, track_running_stats=False): "the rule of BatchNorm1d says that it does not apply",
        nn.Sequential(nn.Linear(5, 3)): r"Sequential has no parameters of its own; its part '0' \(Linear\) may",
        nn.ReLU(): "ReLU has no parameters of its own",
    }.items():
        with pytest.raises(ValueError, match=why):
            nm.check_rule(module, randn(4, 5))


def test_a_rule_that_refuses_at_work_is_an_error() -> None:
    def refuses(call: Call) -> dict[str, Form]:
        raise NotApplicableError(f"{type(call.module).__name__} is not what it seems")

    with pytest.raises(ValueError, match="Mine is not what it seems"):
        nm.check_rule(layer_with(refuses), randn(4, 6, 5))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(0))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight * x, x


nm.rule(Mixing, Pair, parameters=("weight",))(lambda call: {"weight": Dense(call.g * call.x)})


@pytest.mark.parametrize(
    ("module", "inputs", "options", "text"),
    [
        ("Linear", randn(4, 5), {}, "`module` must be a torch.nn.Module"),
        (nn.Linear(5, 3), [1, 2], {}, "`inputs` must be a tensor"),
        (nn.Linear(5, 3), (1, randn(4, 5)), {}, "a tuple that begins with int"),
        (nn.Linear(5, 3), (), {}, "`inputs` must be a tensor"),
        (nn.Linear(5, 3), randn(1, 5), {}, "at least two samples"),
        (nn.Linear(5, 3), randn(4, 6), {}, "what a Linear in float64 can be called with"),
        (nn.Linear(5, 3), randn(4, 5).fill_(torch.nan), {}, "finite"),
        (nn.Linear(5, 3), randn(4, 5), {"samples": 1}, "`samples` must be between 2"),
        (nn.Linear(5, 3), randn(4, 5), {"seed": 0.5}, "`seed` must be an int"),
        (Mixing(), randn(4, 5), {}, "one that treats samples apart"),
        (Pair(), randn(4, 5), {}, "one that returns a tensor"),
    ],
)
def test_bad_input(module: nn.Module, inputs: Tensor, options: dict[str, int], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        nm.check_rule(module, inputs, **options)


def test_a_batch_without_samples_goes_through_every_layer() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Conv1d(3, 2, 2), nn.PReLU(), nn.Flatten(), nn.Linear(6, 3))
    whole = nm.fisher_diagonal(model, [ids(4, 3)], seed=1)
    with_none = nm.fisher_diagonal(model, [ids(4, 3), ids(0, 3)], seed=1)
    for name in whole:
        assert torch.equal(whole[name], with_none[name])


def test_the_skeleton_to_copy_runs_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    skeleton = Path(__file__).parents[2] / "docs" / "skeletons" / "rule.py"
    with torch.random.fork_rng():
        runpy.run_path(str(skeleton), run_name="__main__")
    assert capsys.readouterr().out.startswith("Rule `my_layer` on MyLayer: passed")


def test_what_a_rule_needs_is_within_reach() -> None:
    assert nm.persample.gradients.Dense is Dense
    assert nm.persample.rules.Call is Call
