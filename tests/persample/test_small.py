"""Small parameters squared together give what each would give on its own."""

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.accumulate.small import SmallSums
from neuromanifold.persample.gradients import Dense
from neuromanifold.persample.rules import registry
from neuromanifold.reference import network as reference


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(sums: SmallSums, taken: dict[int, list[tuple[Tensor, float, float]]]) -> None:
    squares, fourths, noiseless = sums.squares(), sums.fourths(), sums.noiseless()
    assert set(squares) == set(taken)
    for i, entries in taken.items():
        own = [(values.double() / scale, noise) for values, scale, noise in entries]
        torch.testing.assert_close(squares[i].double(), sum(v.square().sum(0) for v, _ in own), rtol=1e-5, atol=1e-12)
        expected = sum(noise * v.pow(4).sum(0) for v, noise in own)
        found = fourths.get(i, torch.zeros_like(expected))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-12)
        expected = sum((v.square().sum(0) for v, noise in own if not noise), torch.zeros_like(squares[i].double()))
        found = noiseless.get(i, torch.zeros_like(expected)).double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-12)


def test_passes_of_all_kinds() -> None:
    sums, taken = SmallSums(separate_noiseless=True), {}
    for step, (n, scale, noise_factor) in enumerate([(4, 1.0, 0.5), (4, 8.0, 0.5), (3, 1.0, 0.0), (1, 1.0, 1.0)]):
        for i, shape in enumerate([(3,), (), (2, 5), (0,)]):
            if (step + i) % 4 == 3:
                continue  # not all parameters in all batches
            values = noise(n, *shape, seed=10 * step + i)
            sums.add(i, values, scale, noise_factor)
            taken.setdefault(i, []).append((values, scale, noise_factor))
    check(sums, taken)


def test_the_same_parameter_twice_in_a_pass() -> None:
    sums, values = SmallSums(), [noise(4, 3, seed=seed) for seed in range(3)]
    for value in values:
        sums.add(7, value, 1.0, 0.25)
    check(sums, {7: [(value, 1.0, 0.25) for value in values]})


def test_parameters_that_differ_in_every_batch() -> None:
    sums, taken = SmallSums(), {}
    for step in range(40):
        for i in {step % 5, 5 + step % 7, 12 + step % 3}:
            values = noise(2, 4, seed=100 * step + i)
            sums.add(i, values, 1.0, 0.5)
            taken.setdefault(i, []).append((values, 1.0, 0.5))
        sums.flush()
    assert len(sums._lines) < 40
    check(sums, taken)


def test_tiny_and_huge_numbers_have_fourth_powers() -> None:
    sums, values = SmallSums(), torch.tensor([[1e-15, 1e15]])
    sums.add(0, values, 1.0, 1.0)
    torch.testing.assert_close(sums.fourths()[0], values[0].double().pow(4), rtol=1e-6, atol=0.0)


def test_results_have_memory_of_their_own() -> None:
    sums = SmallSums()
    for i in range(3):
        sums.add(i, noise(2, 4, seed=i), 1.0, 1.0)
    first, second = sums.squares(), sums.squares()
    before = second[1].clone()
    first[0].fill_(9.0)
    first[1].fill_(9.0)
    assert torch.equal(second[1], before)
    assert len({value.untyped_storage().data_ptr() for value in first.values()}) == 3


def test_gradients_come_in_the_parameters_shape_and_precision() -> None:
    values = torch.full((2, 1, 3), 300.0, dtype=torch.float16)  # its square is no float16
    assert torch.equal(Dense(values).values_for(torch.zeros(3)), torch.full((2, 3), 300.0))
    assert Dense(values).values_for(torch.zeros(3, dtype=torch.float64)).dtype == torch.float64
    assert Dense(values.double()).values_for(torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.float32
    with pytest.raises(ValueError, match="parameter's shape"):
        Dense(values).values_for(torch.zeros(4))


@pytest.mark.parametrize("wrong", ["another dimension", "another size"])
def test_a_rules_gradients_have_the_parameters_shape(wrong, monkeypatch):
    """Small parameters take the shape of whatever a rule gives."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    def rule(call: registry.Call) -> dict[str, Dense]:
        g = call.g
        return {"shift": Dense(g[:, None] if wrong == "another dimension" else torch.cat([g, g[:, :1]], 1))}

    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    nm.rule(Shift, parameters=("shift",))(rule)
    model = nn.Sequential(nn.Linear(6, 3), Shift())
    try:
        found = nm.fisher_diagonal(model, [torch.ones(4, 6)])
    except (TypeError, ValueError, RuntimeError):
        return  # refused: as good
    assert found["1.shift"].shape == found.stderr["1.shift"].shape == (3,)


class Halved(torch.autograd.Function):
    """Works in place on a gradient that is not its own, which autograd forbids and does not notice."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, g: Tensor) -> Tensor:
        return g.mul_(0.5)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = Halved.apply(self.first(x))
        return halved + self.second(x)


def test_gradients_that_are_overwritten_while_they_wait_are_left_to_autograd() -> None:
    """The second layer's bias waits with the very tensor that the first branch overwrites then."""
    torch.manual_seed(0)
    model, x = Branches().double(), noise(5, 3).double()
    with pytest.warns(nm.SlowPathWarning, match="second"):
        found = nm.fisher_diagonal(model, [x], nm.Exact(), reduction="sum")
    for name, expected in reference.reference_diagonal(model, lambda m: m(x)).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-14)
