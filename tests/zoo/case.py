"""A case of the zoo: a model and batches made from a few drawn numbers, twice the same (for library and reference).

A *kind* is a function from a `Maker` to a model and the inputs of its batches.  It takes sizes from the maker and picks
options there, so Hypothesis draws `Spec`s without knowing the kinds, and shrinks to small sizes and first options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.problems.problem import Net

SIZES = ((3, 3), (2, 4, 1), (3,), (3, 2, 3), (1, 4), (4, 4, 4), (1, 1), (2,), (5, 2), (1, 3, 3, 2), (2, 2), (1,))


@dataclass(frozen=True)
class Spec:
    """Drawn numbers: `sizes` of batches, T, d, C, a seed, and integers that options are picked by."""

    kind: str
    sizes: tuple[int, ...]
    steps: int
    width: int
    classes: int
    picks: tuple[int, ...]
    seed: int
    dtype: torch.dtype


@dataclass
class Case:
    """What a kind makes of a spec."""

    model: nn.Module
    inputs: list[Any]  # of each batch: a tensor, or a tuple of arguments
    labels: list[Tensor] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # of fisher_diagonal
    mixes: bool = False  # samples influence each other: there must be a warning
    changes_itself: bool = False  # forward replaces weights of the model
    may_warn: bool = False  # logits depend on the place in the batch, so that a warning of mixed samples is true
    may_refuse: bool = False  # may be refused even where there is one batch only, so that nothing can come late
    chosen: dict[str, Any] = field(default_factory=dict)

    def data(self) -> list[Any]:
        """Fresh batches, for a model that may overwrite them."""
        return [(_copied(x), y.clone()) for x, y in zip(self.inputs, self.labels, strict=True)]


Kind = Callable[["Maker"], Case]


class Maker:
    """Sizes, options and random numbers for a kind; the same again for the same spec."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.chosen: dict[str, Any] = {}
        self.t, self.d, self.c = spec.steps, spec.width, spec.classes
        self._generator = torch.Generator().manual_seed(spec.seed)

    def pick(self, name: str, *options: Any) -> Any:
        """One of the options, by the next drawn integer; the first is the simplest."""
        number = self.spec.picks[len(self.chosen) % len(self.spec.picks)] % len(options)
        value = options[number]
        self.chosen[name] = f"{type(value).__name__} {number}" if isinstance(value, nn.Module) else value
        return value

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """float64 numbers that float32 holds exactly."""
        return (torch.randn(shape, generator=self._generator) * scale).double()

    def randint(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape))  # `case` fills it

    def head(self, width: int | None = None, bias: bool = True) -> nn.Linear:
        return nn.Linear(self.d if width is None else width, self.c, bias=bias)

    def inputs(self, *shape: int) -> list[Any]:
        """Batches of tensors [B, *shape]."""
        return [self.randn(size, *shape) for size in self.spec.sizes]

    def case(
        self,
        run: Callable[..., Any] | nn.Module,
        inputs: list[Any],
        parts: dict[str, Any] | None = None,
        positions: int | None = None,
        **flags: Any,
    ) -> Case:
        """A model of parts with random parameters, labels for [B, C] or (`positions`) [B, T, C] logits."""
        model = run if isinstance(run, nn.Module) else Net(run, **(parts or {}))
        model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                values = self.randn(*parameter.shape, scale=0.7)
                parameter.copy_(values if parameter.is_floating_point() else torch.complex(values, values.flip(0)))
        shape = () if positions is None else (positions,)
        labels = [self.randint(self.c, size, *shape) for size in self.spec.sizes]
        return Case(model, inputs, labels, chosen=self.chosen, **flags)


def make(spec: Spec, kinds: dict[str, Kind], dtype: torch.dtype | None = None) -> Case:
    """The case of a spec, in its own dtype or another."""
    dtype = spec.dtype if dtype is None else dtype
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)  # of whatever torch draws when a module is made
        case = kinds[spec.kind](Maker(spec))
    case.model.to(dtype)
    case.inputs = [_cast(value, dtype) for value in case.inputs]
    return case


def specs(kind: str, fewest: int = 1) -> st.SearchStrategy[Spec]:
    """Specs of one kind; the simplest has two batches of three samples, three positions and three features."""
    sizes = [tuple(max(size, fewest) for size in one) for one in SIZES]
    return st.builds(
        Spec,
        kind=st.just(kind),
        sizes=st.sampled_from(sizes),
        steps=st.sampled_from((3, 2, 4, 1, 5)),
        width=st.sampled_from((3, 2, 4)),
        classes=st.sampled_from((3, 2, 4)),
        picks=st.tuples(*[st.integers(0, 59)] * 5),
        seed=st.integers(0, 999),
        dtype=st.sampled_from((torch.float64, torch.float64, torch.float64, torch.float32)),
    )


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copied(one) for one in value)
    return value.clone() if isinstance(value, Tensor) and value.layout == torch.strided else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
