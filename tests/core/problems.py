"""Distributions as data: logits [samples, C] in float64 with readable names, from uniform to one-hot."""

import math

import torch
from hypothesis import strategies as st


def _normal(samples: int, classes: int, seed: int) -> torch.Tensor:
    return torch.randn(samples, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _make() -> dict[str, torch.Tensor]:
    problems = {}
    for classes in (2, 3, 5, 12):
        for scale in (1e-14, 1e-8, 1e-3, 1.0, 10.0, 100.0, 1000.0):
            problems[f"normal-C{classes}-scale{scale:g}"] = scale * _normal(3, classes, seed=classes)
        problems[f"uniform-C{classes}"] = torch.zeros(2, classes, dtype=torch.float64)
        one_hot = torch.zeros(2, classes, dtype=torch.float64)
        one_hot[:, -1] = torch.tensor([40.0, 1000.0])
        problems[f"one-hot-C{classes}"] = one_hot
        problems[f"ties-C{classes}"] = 3 * _normal(4, classes, seed=1).round()
        problems[f"near-ties-C{classes}"] = 3 * _normal(4, classes, seed=1).round() + 1e-14 * _normal(4, classes, 2)
        problems[f"underflow-C{classes}"] = -370.0 * torch.arange(classes, dtype=torch.float64).repeat(1, 1)
        masked = _normal(3, classes, seed=3)
        masked[:, 1:-1] = -math.inf
        problems[f"masked-C{classes}"] = masked
        problems[f"geometric-C{classes}"] = -math.log(1e20) * torch.arange(classes, dtype=torch.float64).repeat(1, 1)
    zipf = -torch.arange(1, 13, dtype=torch.float64).log()
    problems["zipf-C12"] = torch.tensor([0.5, 1.0, 2.0, 30.0], dtype=torch.float64)[:, None] * zipf
    problems["two-clusters-C12"] = torch.cat([20 + 1e-6 * _normal(2, 6, 4), 1e-6 * _normal(2, 6, 5)], dim=-1)
    problems["one-and-many-C12"] = torch.cat([torch.full((2, 1), 30.0), 0.1 * _normal(2, 11, 6)], dim=-1).double()
    return problems


PROBLEMS = _make()


@st.composite
def logits(draw: st.DrawFn, least: int = 2, most: int = 12) -> torch.Tensor:
    """Logits [C] of any scale, with ties, near ties and impossible classes: for property tests."""
    classes = draw(st.integers(least, most))
    values = draw(st.lists(st.floats(-1, 1), min_size=classes, max_size=classes))
    z = torch.tensor(values, dtype=torch.float64) * 10 ** draw(st.floats(-15, 3))
    if draw(st.booleans()):
        z = z.round()
    if draw(st.booleans()):
        z[draw(st.integers(0, classes - 1))] += draw(st.floats(0, 1000))
    if draw(st.booleans()):
        z[draw(st.lists(st.integers(1, classes - 1), max_size=classes))] = -math.inf
    return z
