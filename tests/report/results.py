"""Results that the tests of summaries and pages look at: odd on purpose, with numbers that are known."""

import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.results import Provenance


def result(
    sums: dict[str, Tensor],
    noise: float = 0.1,
    estimator: str = "Hutchinson(probes=1, deflate=1, noise='rademacher', envelope=None, orthogonal=True)",
    target: str = "unbiased",
    granularities: dict[str, str] | None = None,
    count: int = 10,
    model: str = "Net with 3 parameters",
    stopped: str = "",
) -> nm.DiagonalFisher:
    granularity = dict.fromkeys(sums, "sample") | (granularities or {})
    p = Provenance(estimator, target, granularity=granularity, batches=2, passes=2, model=model, stopped=stopped)
    return nm.DiagonalFisher(sums, {name: noise * value for name, value in sums.items()}, count, count, p)


def transformer(seed: int = 0) -> dict[str, Tensor]:
    """An embedding with rows that were never looked up, two blocks, a dead parameter, a head with most of the trace."""
    generator = torch.Generator().manual_seed(seed)

    def entries(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator).square()

    sums = {"net.embed.word_embeddings.weight": entries(50, 6)}
    sums["net.embed.word_embeddings.weight"][10:] = 0
    for i in range(2):
        sums |= {f"net.layer.{i}.query.weight": entries(6, 6), f"net.layer.{i}.query.bias": entries(6, scale=3)}
        sums |= {f"net.layer.{i}.dense.weight": entries(12, 6, scale=1e-3)}
    sums["net.layer.1.key.bias"] = torch.zeros(6)
    return sums | {"classifier.weight": entries(3, 6, scale=100), "classifier.bias": entries(3, scale=100)}


def odd() -> dict[str, Tensor]:
    """Empty, zero, single, tiny and huge, tied, strided, half precision, without dimensions."""
    generator = torch.Generator().manual_seed(1)
    return {
        "empty.weight": torch.zeros(0, 4),
        "zero.weight": torch.zeros(5, 3),
        "single.weight": torch.tensor([[1e-3]]),
        "wide.weight": 10 ** (-44 + 80 * torch.rand(301, generator=generator, dtype=torch.float64)),
        "alike.weight": torch.full((9,), 2.0),
        "two.weight": torch.tensor([1.0, 4.0]),
        "strided.weight": torch.rand(8, 6, generator=generator).t()[::2],
        "half.weight": torch.rand(40, generator=generator).bfloat16(),
        "scalar": torch.tensor(0.25),
        "sparse.weight": torch.rand(2000, generator=generator).sub(0.9).relu(),
        "image.weight": torch.rand(4, 3, 3, 3, generator=generator),
    }
