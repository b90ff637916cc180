"""The columns of a part of the metric, which come in blocks."""

import pytest
import torch

import neuromanifold as nm
from neuromanifold.core import Core
from neuromanifold.estimators import envelopes as parts


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


CORES: dict[str, Core] = {
    "categorical": nm.Categorical(normal(4, 7)),
    "one distribution": nm.Categorical(normal(7)),
    "no distribution": nm.Categorical(normal(0, 7)),
    "Bernoulli": nm.Bernoulli(normal(2, 3, 5)),
    "Gaussian": nm.Gaussian(normal(3, 4)),
}


@pytest.mark.parametrize("block", [1, 56, 60, 84, 10**9])
@pytest.mark.parametrize("name", CORES)
def test_columns_do_not_depend_on_the_size_of_blocks(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core, sizes = CORES[name], []

    def columns(start: int, stop: int) -> torch.Tensor:
        sizes.append(stop - start)
        return type(core).columns(core, start, stop)

    monkeypatch.setattr(parts, "BLOCK", block)
    monkeypatch.setattr(core, "columns", columns)
    found = torch.stack(list(parts.factor_columns(core, None)))
    assert torch.equal(found, torch.stack([core.column(i) for i in range(core.rank)]))
    torch.testing.assert_close(torch.einsum("k...c,k...d->...cd", found, found), core.fisher())
    numbers = max(1, core.batch_shape.numel() * core.dim)
    assert sum(sizes) == core.rank
    assert all(size == 1 or size * numbers <= block for size in sizes)
    assert len(sizes) == 1 or block < core.rank * numbers  # all at once where they are few
