"""Kernels read odd inputs where they are: strides, precisions, and more than 2³¹ numbers."""

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.rules import registry
from tests import forked


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", "interpret")


@pytest.mark.parametrize("rows", ["columns apart", "transposed"])
@pytest.mark.usefixtures("interpreted")
def test_batch_norm_takes_rows_that_are_not_contiguous(rows):
    """[n, c] is handed to the kernel with whatever strides it has."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 12), nn.BatchNorm1d(6), nn.Linear(6, 3)
            self.norm.running_mean, self.norm.running_var = torch.arange(6.0), torch.arange(6.0) + 0.5

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(self.norm(h[:, ::2] if rows == "columns apart" else h[:, :6].T.contiguous().T))

    torch.manual_seed(0)
    model, x = Model(), inputs(5, 4)
    found = nm.fisher_diagonal(model, [x], nm.Exact())
    expected = nm.fisher_diagonal(model.double(), [x.double()], nm.Exact())
    torch.testing.assert_close(found["norm.weight"].double(), expected["norm.weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("interpreted")
def test_rms_norm_in_half_precision_has_torchs_own_epsilon(dtype):
    """Torch's default epsilon is that of float32 for float16 and bfloat16 inputs, too."""
    module, x = nn.RMSNorm(4).to(dtype), torch.full((1, 4), 1e-3, dtype=dtype)
    rule = registry.find_rule(module)
    assert rule is not None
    call = registry.Call(module, x, (), {}, torch.ones_like(x), frozenset({"weight"}))
    form = rule.function(call)["weight"]
    torch.testing.assert_close(form.gradients(0, 1, torch.float32), module(x).detach().float(), rtol=0.01, atol=0)


def product_of(far: Tensor) -> None:
    from neuromanifold.kernels.triton.product import launch_product_squares

    squares = torch.zeros(4, 4)
    launch_product_squares(far, far, squares)
    assert squares.eq(9.0).all()


def pack_of(far: Tensor) -> None:
    from neuromanifold.kernels.triton.pack import pack

    packed = pack(far)
    assert (packed.values.float() * packed.scales).eq(1.0).all()


@pytest.mark.parametrize(("work", "dtype"), [(product_of, torch.float16), (pack_of, torch.float32)])
def test_a_sample_with_more_than_2_to_the_31_numbers_is_read_where_it_is(work, dtype):
    """A position times its stride is computed in 32 bits: 32,768 tokens of 65,536 outputs, or samples second."""
    pytest.importorskip("triton")

    def far_away() -> None:
        memory = torch.empty(2**31 + 8, dtype=dtype)  # virtual: three pages of it are used
        work(memory.as_strided((1, 3, 4), (1, 2**30, 1)).fill_(1.0))  # position 2 begins at number 2**31

    done = forked.run(far_away)  # which would be killed
    assert done.returncode == 0, f"exit status {done.returncode} {done.stderr[-300:]}"
