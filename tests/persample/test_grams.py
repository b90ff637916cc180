"""Inner products of gradients without the gradients: every kind of stack against gradients written out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from neuromanifold.bounds.grams import ClassGradients
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.engine import PerSampleGradients
from neuromanifold.persample.gradients import Dense, Form, Product, Rows, add, stacks
from neuromanifold.persample.gradients.stacks import Factors, Flat, Forms, Several, Stack, gram, stack
from neuromanifold.persample.rules.convolution import Convolution

N, C = 3, 4


def tensors(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def products(t: int, seed: int = 0, turned: bool = False) -> list[Form | None]:
    randn = tensors(seed)
    shared = randn(N, t, 5)
    return [Product(shared, randn(N, t, 6)) if turned else Product(randn(N, t, 6), shared) for _ in range(C)]


def rows(t: int, seed: int = 0) -> list[Form | None]:
    randn = tensors(seed)
    ids = torch.randint(0, 6, (N, t), generator=torch.Generator().manual_seed(seed))
    return [Rows(randn(N, t, 5), ids, 6) for _ in range(C)]


def convolutions(seed: int = 0) -> list[Form | None]:
    randn = tensors(seed)
    x, options = randn(N, 1, 2, 5, 5), ((1, 1), (0, 0), (1, 1), False, 1)
    return [Convolution(x, randn(N, 1, 3, 3, 3), torch.Size((3, 2, 3, 3)), *options) for _ in range(C)]


def some_missing(forms: list[Form | None]) -> list[Form | None]:
    return [None, *forms[1:3], None]


def tied(t: int, seed: int = 0) -> list[Form | None]:
    return [add([a, b]) for a, b in zip(products(t, seed), rows(t + 1, seed), strict=True) if a and b]


def mixed_sum(seed: int = 0) -> list[Form | None]:
    return [add([a, Dense(tensors(seed + c)(N, 6, 5))]) for c, a in enumerate(products(2, seed)) if a]


def unshared(seed: int = 0) -> list[Form | None]:
    randn = tensors(seed)
    return [Product(randn(N, 2, 6), randn(N, 2, 5)) for _ in range(C)]


KINDS: dict[str, tuple[Callable[..., list[Form | None]], type[Stack]]] = {
    "one position": (lambda seed: products(1, seed), Factors),
    "few positions": (lambda seed: products(3, seed), Factors),
    "many positions": (lambda seed: products(40, seed), Factors),
    "turned": (lambda seed: products(3, seed, turned=True), Factors),
    "turned, one position": (lambda seed: products(1, seed, turned=True), Factors),
    "nothing shared": (unshared, Forms),
    "embedding": (lambda seed: rows(4, seed), Factors),
    "bias": (lambda seed: [Dense(tensors(seed + c)(N, 6)) for c in range(C)], Flat),
    "scalar": (lambda seed: [Dense(tensors(seed + c)(N)) for c in range(C)], Flat),
    "convolution": (convolutions, Forms),
    "tied": (lambda seed: tied(3, seed), Several),
    "a sum of other kinds": (mixed_sum, Several),
    "classes without": (lambda seed: some_missing(products(3, seed)), Factors),
    "classes without, bias": (lambda seed: some_missing([Dense(tensors(seed + c)(N, 6)) for c in range(C)]), Flat),
    "classes without, convolution": (lambda seed: some_missing(convolutions(seed)), Forms),
}


def written_out(forms: list[Form | None]) -> Tensor:
    """[n, c, numbers of the parameter]."""
    some = next(form for form in forms if form is not None)
    size = some.shape.numel()
    parts = [
        torch.zeros(N, size).double() if f is None else f.gradients(0, N, torch.float64).reshape(N, size) for f in forms
    ]
    return torch.stack(parts, 1)


@pytest.mark.parametrize("tile", [None, 7])
@pytest.mark.parametrize("name", KINDS)
def test_inner_products_of_each_sample_and_between_samples(
    name: str, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile:
        monkeypatch.setattr(stacks, "_TILE", {True: tile, False: tile})
    make, kind = KINDS[name]
    forms, others = make(0), make(10)
    a, b = stack(forms), stack(others)
    assert isinstance(a, kind)
    g, h = written_out(forms), written_out(others)
    torch.testing.assert_close(a.inner(), g @ g.mT)
    both = torch.cat([g.flatten(0, 1), h.flatten(0, 1)])
    torch.testing.assert_close(gram([a, b]), both @ both.T)
    torch.testing.assert_close(gram([a, b], limit=1), both @ both.T)
    index = torch.tensor([2, 0])
    taken = a.take(index)
    torch.testing.assert_close(taken.inner(), (g @ g.mT)[index])
    part = torch.cat([g[index].flatten(0, 1), h.flatten(0, 1)])
    torch.testing.assert_close(gram([taken, b]), part @ part.T)
    assert len(a.take(torch.tensor([], dtype=torch.int64)).inner()) == 0
    assert a.numbers > 0


def test_kinds_may_differ_between_batches() -> None:
    """The same parameter may come as a product, turned, as rows, or written out."""
    forms = [products(1), rows(4, 1), [Dense(tensors(c)(N, 6, 5)) for c in range(C)], unshared(2)]
    everything = torch.cat([written_out(one).flatten(0, 1) for one in forms])
    torch.testing.assert_close(gram([stack(one) for one in forms]), everything @ everything.T)


def test_memory_bounds_how_many_layers_are_done_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4)).double()
    x, outputs = tensors(0)(6, 8), 6 * 8 * 4
    engine = PerSampleGradients(model, dict(model.named_parameters()))
    with engine.attached():
        reference = engine.reference(model(x))
        with engine.capturing():
            logits = model(x)
        backward = engine.backward_of(logits, reference)
        assert isinstance(backward, PerSampleBackward)
        classes = ClassGradients(backward)
        for layers in (1, 2, 5):
            groups = classes._groups(4, layers * outputs * 4)
            assert max(map(len, groups)) <= 2 * max(layers, 2)
            assert sorted(i for group in groups for i in group) == list(range(12))
        found = {}
        for budget in (1, 2**30):
            each = classes.stacks(
                logits, lambda c: nn.functional.one_hot(torch.full((6,), c), 4).double(), budget=budget
            )
            found[budget] = sum(one.inner() for _, one in each)
    torch.testing.assert_close(found[1], found[2**30])
