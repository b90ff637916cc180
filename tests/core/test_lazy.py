"""A core costs nothing before something is asked of it, and gives the same whatever mode that happens in."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import neuromanifold as nm


class Recorder(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_construction_computes_nothing(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 4, dtype=dtype)
    with Recorder() as recorder:
        core = nm.Categorical(logits, validate=False)
        assert (core.dim, core.rank, core.batch_shape) == (4, 3, (3,))
        assert core.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert recorder.names == []
    with recorder:
        assert core.probs is core.probs
    assert recorder.names.count("aten._softmax.default") == 1
    assert core.logits.dtype == core.probs.dtype == core.dtype


def test_derivatives_do_not_depend_on_who_asked_first() -> None:
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    core = nm.Categorical(logits)
    core.sample(torch.Generator())  # works under no_grad
    (slope,) = torch.autograd.grad(core.trace().sum(), logits)
    assert (slope != 0).any()
    with torch.no_grad():
        core = nm.Categorical(logits)
    assert not core.trace().requires_grad


def test_inference_mode_leaves_no_trace() -> None:
    core = nm.Categorical(torch.zeros(3, 4))
    with torch.inference_mode():
        _ = core.probs
    weight = torch.ones(4, requires_grad=True)
    (core.probs * weight).sum().backward()
    assert weight.grad is not None
