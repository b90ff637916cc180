"""Where samples are is found out, also where shapes alone would mislead, and where it changes from batch to batch."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm, linear, softplus

import neuromanifold as nm
from neuromanifold.persample import plan
from neuromanifold.reference import network as reference


class Order(nn.Module):
    """A position table that all samples share, and a layer that may see positions before samples."""

    def __init__(self, kind: str, pooled: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.kind, self.pooled = kind, pooled

    def forward(self, ids: Tensor) -> Tensor:
        samples, length = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(length))
        if self.kind == "samples first":
            x = self.layer(x)
        elif self.kind == "flat, samples first":
            x = self.layer(x.reshape(samples * length, 4)).view(samples, length, 4)
        elif self.kind == "flat, positions first":
            x = self.layer(x.transpose(0, 1).reshape(length * samples, 4)).view(length, samples, 4).transpose(0, 1)
        elif self.kind == "positions first":
            x = self.layer(x.transpose(0, 1)).transpose(0, 1)
        else:
            x = linear(x.transpose(0, 1), self.layer.weight, self.layer.bias).transpose(0, 1)
        x = torch.tanh(x)
        return self.head(x.sum(1) if self.pooled == "sum" else x[:, int(self.pooled)])


KINDS = ("samples first", "flat, samples first", "flat, positions first", "positions first", "a function")
SHAPES = (  # of ids in one batch after the other: as many positions as samples in the first, in a later one, ...
    [(3, 5), (3, 3), (2, 3), (1, 4)],
    [(3, 3), (3, 5), (1, 3)],
    [(2, 3), (2, 4), (4, 2)],
    [(1, 3), (3, 3), (3, 4)],
    [(2, 3), (2, 3), (3, 2)],
    [(4, 2), (0, 3), (2, 4)],
)


@pytest.mark.parametrize("pooled", ["0", "1", "sum"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_found_whatever_the_order_and_the_shapes(
    kind: str, shapes: list[tuple[int, int]], pooled: str
) -> None:
    torch.manual_seed(0)
    model = Order(kind, pooled).double()
    data = [torch.randint(0, 7, shape) for shape in shapes]
    result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    expected = [reference.reference_diagonal(model, lambda m, x=x: m(x)) for x in data if len(x)]
    for name in result:
        torch.testing.assert_close(result[name], sum(one[name] for one in expected), rtol=1e-10, atol=1e-14)
    assert set(result.provenance.granularity.values()) == {"sample"}  # and none of it slowly


class Sometimes(nn.Module):
    """Uses a weight outside of its module, but not in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, twist: bool) -> Tensor:
        y = self.layer(x)
        return self.head(torch.tanh(y @ self.layer.weight.exp() if twist else y))


@pytest.mark.parametrize("twists", [(True, False), (False, True)])
def test_what_changes_from_batch_to_batch_is_followed(twists: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    model = Sometimes().double()
    data = [{"x": torch.randn(4, 3).double(), "twist": twist} for twist in twists]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    expected = [reference.reference_diagonal(model, lambda m, batch=batch: m(**batch)) for batch in data]
    for name in result:
        torch.testing.assert_close(result[name], sum(one[name] for one in expected), rtol=1e-10, atol=1e-14)


def test_a_weight_shared_by_two_models_parts_and_frozen_in_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    x = torch.randn(5, 3).double()
    result = nm.fisher_diagonal(model, [x], nm.Exact(), reduction="sum")
    expected = reference.reference_diagonal(model, lambda m: m(x))
    assert set(result) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-10, atol=1e-14)


class TurnsLater(nn.Module):
    """An operation along one dimension or another, by a number in the data: graphs of the same shapes."""

    def __init__(self, operation: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layer, self.operation = nn.Linear(3, 4), operation

    def forward(self, x: Tensor, dim: Tensor) -> Tensor:
        return self.operation(torch.tanh(self.layer(x)), int(dim[0]))


def _indexed(h: Tensor, dim: int) -> Tensor:
    return (h[torch.arange(5).flip(0)] if dim == 0 else h[:, torch.arange(5).flip(0)])[:, 0] + h[:, 1]


def _shifted(h: Tensor, dim: int) -> Tensor:
    return (nn.functional.pad(h, (0, 0, 0, 0, 1, -1) if dim == 0 else (0, 0, 1, -1, 0, 0)) + h).sum(1)


@pytest.mark.parametrize(
    "operation",
    [
        *(Tensor.amin, Tensor.logsumexp, Tensor.std, Tensor.var, Tensor.prod, Tensor.mean),
        *(lambda h, dim: h.max(dim).values, lambda h, dim: h.median(dim).values, lambda h, dim: h.norm(dim=dim)),
        *(lambda h, dim: h.cumsum(dim).sum(1), lambda h, dim: h.softmax(dim).sum(1), _indexed, _shifted),
    ],
)
def test_an_operation_that_turns_to_another_dimension_makes_another_kind_of_graph(operation) -> None:
    """All that decides where rows go is part of the signature; the first two batches do not show the difference."""
    torch.manual_seed(0)
    model = TurnsLater(operation).double()
    data = [((torch.randn(5, 5, 3).double(), torch.full((5,), float(k < 2))),) for k in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that mix, and that are then done one by one
        found = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    for name in found:
        expected = sum(reference.reference_diagonal(model, lambda m, one=one: m(*one[0]))[name] for one in data)
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-14)


class Experts(nn.Module):
    """A mixture of experts: the data decide which rows a module gets."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = (rows[:, 0] > 0).nonzero()[:, 0]
        mixed = rows.index_copy(0, chosen, self.expert(rows[chosen]))
        return self.head(torch.tanh(mixed).view(x.shape).sum(1))


class LateMixing(nn.Module):
    """Samples influence each other, but only in large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y - torch.tanh(y).mean(0) if len(x) > 2 else y


def _routed(samples_and_positions: list[tuple[int, int]]) -> Tensor:
    x = torch.randn(4, 3, 4).double()
    x[..., 0] = -1.0
    for sample, position in samples_and_positions:
        x[sample, position, 0] = 1.0
    return x


def test_layouts_are_looked_for_once_for_each_kind_of_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, candidates = [], plan._layouts
    monkeypatch.setattr(
        plan, "_layouts", lambda capture, *others: looked.append(capture.key) or candidates(capture, *others)
    )
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = [torch.randn(samples, 6) for samples in (7, 4, 7, 8)]
    fim = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    assert looked == [(0, 0), (1, 0)]  # 4 and 8 samples are the same kind as 7
    expected = reference.reference_diagonal(model, lambda m: m(torch.cat(data).double()))
    for name in expected:
        torch.testing.assert_close(fim[name].double(), expected[name], rtol=1e-5, atol=1e-7)
    nm.fisher_diagonal(model, [*data, torch.randn(5, 6)], nm.Exact())
    assert looked[2:] == [(0, 0), (1, 0)] * 3  # 5 is the first layer's width: another kind, repeated for verification


def test_rows_that_the_data_choose_are_looked_at_in_every_batch() -> None:
    """As many rows as samples each time; one for each sample first, then three of one sample."""
    torch.manual_seed(0)
    model = Experts().double()
    data = [_routed([(0, 0), (1, 2), (2, 1), (3, 0)]), _routed([(0, 0), (0, 1), (0, 2), (2, 0)])]
    _assert_right(model, data)


def test_mixing_that_begins_later_is_noticed() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4).double()
    _assert_right(LateMixing().double(), [x[:2], x])


def _assert_right(model: nn.Module, data: list[Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    for name in result:
        expected = sum(reference.reference_diagonal(model, lambda m, x=x: m(x))[name] for x in data)
        torch.testing.assert_close(result[name], expected, rtol=1e-10, atol=1e-14)


class Faint(nn.Module):
    """A branch whose gradients are next to nothing: float32 has their values, but not their squares."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.branch = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x) + 1e-36 * self.branch(x)
        return out


def test_gradients_next_to_nothing_belong_to_samples_as_others_do() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of parameters that no rule covers
        result = nm.fisher_diagonal(Faint(), [torch.randn(16, 4)], nm.Exact())
    assert set(result.provenance.granularity.values()) == {"sample"}


class SomeMix(nn.Module):
    """Adds the rows of some samples to those of others, in one direction of the features only."""

    def __init__(self, direction: list[float], pairs: list[tuple[int, int]]) -> None:
        super().__init__()
        self.direction, self.pairs = torch.tensor(direction), pairs
        self.layer, self.head = nn.Linear(4, len(direction)), nn.Linear(len(direction), 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        mixes = torch.zeros(len(h), len(h))
        for to, from_ in self.pairs:
            mixes[to, from_] = 1.0
        out: Tensor = self.head(torch.tanh(h + mixes @ ((h @ self.direction)[:, None] * self.direction)))
        return out


@pytest.mark.parametrize(
    "direction",
    [[1.0, 1.0], [1.0, -1.0], [0.0, 1.0, -1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]],
    ids=str,
)
def test_a_mixture_in_any_direction_is_seen(direction: list[float]) -> None:
    """Sums and differences of few entries are orthogonal to vectors of signs."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model = SomeMix(direction, [(0, 1), (2, 3)])
    with pytest.warns(nm.SlowPathWarning):
        found = nm.fisher_diagonal(model, [x], nm.Exact(), reduction="sum")
    expected = torch.zeros_like(model.layer.weight)
    for z in model(x):
        for log_p in z.log_softmax(-1):
            (g,) = torch.autograd.grad(log_p, model.layer.weight, retain_graph=True)
            expected += log_p.detach().exp() * g**2
    torch.testing.assert_close(found["layer.weight"], expected, rtol=1e-4, atol=1e-6)


class Scaled(nn.Module):
    """As in Gemma (1 + w), Mamba (-exp(w)) and nanoGPT (functional.layer_norm): scales that no rule knows."""

    def __init__(self, scale: Callable[[Tensor], Tensor], fused: bool) -> None:
        super().__init__()
        self.layer, self.head, self.fused, self.function = nn.Linear(4, 4), nn.Linear(4, 3), fused, scale
        self.scale, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.layer(x), self.function(self.scale)
        return self.head(torch.tanh(layer_norm(x, (4,), scale, self.shift) if self.fused else x * scale)).sum(1)


ENTRYWISE = {
    "w": lambda w: w,
    "1 + w": lambda w: 1 + w,
    "3 - 2w": lambda w: 3 - 2 * w,
    "-exp": lambda w: -w.exp(),
    "softplus": softplus,
    "1 / √w": lambda w: 1 / w.sqrt(),
    "2^w": lambda w: 2**w,
    "in place": lambda w: w.mul(2).add_(1),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("function", ENTRYWISE)
def test_functions_of_each_entry_of_a_parameter_are_done_per_sample(function: str, fused: bool) -> None:
    torch.manual_seed(0)
    model = Scaled(ENTRYWISE[function], fused).double()
    data = [torch.randn(*shape, 4, dtype=torch.float64) for shape in ((3, 5), (4, 4), (1, 2))]
    result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    for name in result:
        expected = sum(reference.reference_diagonal(model, lambda m, x=x: m(x))[name] for x in data)
        torch.testing.assert_close(result[name], expected, rtol=1e-10, atol=1e-14)
    assert set(result.provenance.granularity.values()) == {"sample"}


class ScaledEmbedding(nn.Embedding):
    """As in Gemma and BART: a forward of its own, which no rule knows."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class ShiftedEmbedding(nn.Embedding):
    """As in OPT: it is given a mask, and looks up how many there are before."""

    def forward(self, mask: Tensor) -> Tensor:
        return super().forward(mask.cumsum(1) + 1)


class Looked(nn.Module):
    """Rows of several tables, one of which is the head's weight as well."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.words, self.places = ScaledEmbedding(7, 4, padding_idx=1), ShiftedEmbedding(8, 4)
        self.bare, self.head = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 7)
        self.head.weight, self.order = self.words.weight, order

    def forward(self, ids: Tensor) -> Tensor:
        if self.order == "positions first":
            ids = ids.T.contiguous()
        bare = embedding(ids.flatten(), self.bare, padding_idx=2).view(*ids.shape, 4)
        x = torch.tanh(self.words(ids) + bare)
        x = x.transpose(0, 1) if self.order == "positions first" else x + self.places((ids > 0).long())
        return self.head(x).sum(1)


@pytest.mark.parametrize("order", ["samples first", "positions first"])
@pytest.mark.parametrize("shapes", [[(3, 5), (4, 4), (1, 3)], [(2, 2), (2, 4), (0, 2)]], ids=str)
def test_rows_looked_up_by_modules_without_a_rule_are_done_per_sample(shapes: list[Any], order: str) -> None:
    torch.manual_seed(0)
    model = Looked(order).double()
    data = [torch.randint(0, 7, shape) for shape in shapes]
    result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    for name in result:
        expected = sum(reference.reference_diagonal(model, lambda m, x=x: m(x))[name] for x in data if len(x))
        torch.testing.assert_close(result[name], expected, rtol=1e-10, atol=1e-14)
    assert set(result.provenance.granularity.values()) == {"sample"}
    one = nm.fisher_diagonal(model, data, seed=3)  # in a single pass, which frees autograd's graph
    assert one.provenance.granularity == result.provenance.granularity


class Tiled(nn.Module):
    """As in DeBERTa: one layer for words and for relative positions, whose heads are repeated together."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.relative = nn.Embedding(7, 4), nn.Parameter(torch.randn(5, 4))
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        samples, length = ids.shape
        words = self.layer(self.words(ids)).view(samples, length, 2, 2).transpose(1, 2).reshape(samples * 2, length, 2)
        table = (
            self.layer(self.relative[:4].unsqueeze(0)).view(1, 4, 2, 2).permute(0, 2, 1, 3).contiguous().view(2, 4, 2)
        )
        scores = torch.tanh(words @ table.repeat(samples, 1, 1).transpose(1, 2))  # [samples·heads, length, 4]
        return self.head((scores @ table.repeat(samples, 1, 1)).sum(1).view(samples, 4))


@pytest.mark.parametrize("shapes", [[(3, 5), (2, 2), (1, 3)], [(1, 2), (4, 2)]], ids=str)
def test_heads_that_are_repeated_together_are_done_per_sample(shapes: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model = Tiled().double()
    data = [torch.randint(0, 7, shape) for shape in shapes]
    with pytest.warns(nm.SlowPathWarning, match="relative"):  # the layer comes between it and the samples
        result = nm.fisher_diagonal(model, data, nm.Exact(), reduction="sum")
    for name in result:
        expected = sum(reference.reference_diagonal(model, lambda m, x=x: m(x))[name] for x in data)
        torch.testing.assert_close(result[name], expected, rtol=1e-10, atol=1e-14)
    slow = {name for name, how in result.provenance.granularity.items() if how != "sample"}
    assert slow == {"relative"}
