"""Fingerprints are the same for the same, and differ for all else that can be told apart."""

import functools
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.problem.fingerprint import fingerprint

FACTOR = 2.0


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda z: z * factor


def nested(factor: float) -> Callable[[Tensor], Tensor]:
    inner = scaled(factor)
    return lambda z: inner(z) + 1


def calls_itself(n: int) -> int:
    return calls_itself(n - 1) if n else 0


def holds_itself() -> Callable[[int], int]:
    def inner(n: int) -> int:
        return inner(n - 1) if n else 0

    return inner


class Tempered:
    def __init__(self, factor: float) -> None:
        self.factor, self._calls = factor, 0

    def __call__(self, z: Tensor) -> Tensor:
        self._calls += 1
        return z * self.factor

    def method(self, z: Tensor) -> Tensor:
        return z * self.factor


def with_default(z: Tensor, factor: float = 1.0) -> Tensor:
    return z * factor


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "one": lambda: 1,
    "true": lambda: True,
    "text": lambda: "1",
    "tensor": lambda: torch.arange(4.0),
    "other numbers": lambda: torch.arange(4.0) + 1e-6,
    "other shape": lambda: torch.arange(4.0).view(2, 2),
    "other type": lambda: torch.arange(4.0).double(),
    "bfloat16": lambda: torch.arange(4.0).bfloat16(),
    "bool": lambda: torch.arange(4) > 1,
    "complex": lambda: torch.arange(4.0) + 1j,
    "conjugate": lambda: (torch.arange(4.0) + 1j).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "no dimension": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 3),
    "not contiguous": lambda: torch.arange(6.0).view(2, 3).T,
    "numpy": lambda: np.arange(5),
    "list": lambda: [torch.arange(4.0)],
    "pair": lambda: (torch.arange(4.0), None),
    "dict": lambda: {"a": torch.arange(4.0), "b": 1},
    "other names": lambda: {"a": torch.arange(4.0), "c": 1},
    "of its own kind": lambda: UserDict(a=torch.arange(4.0), b=1),
    "class": lambda: nm.Categorical,
    "other class": lambda: nm.Bernoulli,
    "closure": lambda: scaled(2.0),
    "other closure": lambda: scaled(3.0),
    "closure in closure": lambda: nested(2.0),
    "other closure in closure": lambda: nested(3.0),
    "recursive": lambda: calls_itself,
    "holds itself": holds_itself,
    "defaults": lambda: with_default,
    "partial": lambda: functools.partial(with_default, factor=2.0),
    "other partial": lambda: functools.partial(with_default, factor=torch.tensor(3.0)),
    "object": lambda: Tempered(2.0),
    "other object": lambda: Tempered(3.0),
    "method": lambda: Tempered(2.0).method,
    "method of another object": lambda: Tempered(3.0).method,
}


def test_the_same_made_twice_has_one_fingerprint_and_all_others_differ() -> None:
    found = {name: fingerprint(("", make())) for name, make in VALUES.items()}
    assert found == {name: fingerprint(("", make())) for name, make in VALUES.items()}
    assert len(set(found.values())) == len(VALUES)


def hold_each_other(value: int) -> Callable[[int], int]:
    def a(n: int) -> int:
        return b(n) + c(n) + a(n) + value if n else 0

    def b(n: int) -> int:
        return a(n) + b(n) + c(n) if n else 0

    def c(n: int) -> int:
        return a(n) + b(n) + c(n) - value if n else 0

    return a


def test_functions_that_hold_each_other_are_looked_at_once() -> None:
    assert fingerprint(("", hold_each_other(1))) == fingerprint(("", hold_each_other(1)))
    assert fingerprint(("", hold_each_other(1))) != fingerprint(("", hold_each_other(2)))


def test_calls_do_not_count() -> None:
    used = Tempered(2.0)
    used(torch.ones(1))
    assert fingerprint(("", used)) == fingerprint(("", Tempered(2.0)))


def test_a_global_number_that_a_function_uses_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(z: Tensor) -> Tensor:
        return z * FACTOR

    before = fingerprint(("", function))
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert fingerprint(("", function)) != before


def test_of_large_tensors_some_numbers_are_looked_at_in_all_rows_and_columns() -> None:
    x = torch.zeros(256, 256)
    whole, some = fingerprint(("", x)), fingerprint(("", x), most=2**10)
    seen = 0
    for i in range(256):
        row, column = x.clone(), x.clone()
        row[i], column[:, i] = 1, 1
        assert fingerprint(("", row)) != whole
        seen += (fingerprint(("", row), most=2**10) != some) + (fingerprint(("", column), most=2**10) != some)
    assert seen == 512
