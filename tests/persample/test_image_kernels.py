"""Images made channels last, padded, scaled, by Triton's interpreter on the CPU, against torch's own operations."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton")

from neuromanifold.kernels.triton import images
from neuromanifold.kernels.triton.images import arrangement, readable


def last(values: Tensor) -> Tensor:
    """The same, channels last in memory."""
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


def arranged(values: Tensor, *where: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> Tensor:
    """[n, c, *positions]."""
    values, layout = readable(values)
    found, scales = arrangement(layout, values.device, dtype or values.dtype, *where)(values)
    assert scales is None
    assert found.is_contiguous()
    return found.movedim(-1, 1)


def scaled(values: Tensor, *where: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    values, layout = readable(values)
    found, scales = arrangement(layout, values.device, torch.float16, *where, scaled=True)(values)
    return found.movedim(-1, 1), scales


def unscaled(found: Tensor, scales: Tensor) -> Tensor:
    return found.double() * scales.double().view(*scales.shape, *(1,) * (found.ndim - 2))


@pytest.mark.parametrize("layout", [torch.clone, last], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 70, 9, 8), (1, 1, 2, 2, 2), (2, 4, 1), (0, 3, 4), (2, 3, 0)])
def test_images_are_padded_with_channels_last(shape, dtype, layout):
    values = layout(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    padding = (2, 1, 3)[: len(shape) - 2]
    expected = functional.pad(values, [amount for size in reversed(padding) for amount in (size, size)])
    assert torch.equal(arranged(values, None, padding), expected)
    assert torch.equal(arranged(values, dtype=torch.float16), values.half())


@pytest.mark.parametrize("channels", [1, 3, 4, 70])
def test_channels_are_filled_up(channels):
    values = torch.randn(2, channels, 5, generator=torch.Generator().manual_seed(0))
    expected = functional.pad(values, (1, 1, 0, -channels % 4))
    _, layout = readable(values)
    for scaled in (False, True):
        found, scales = arrangement(layout, values.device, torch.float16, None, (1,), scaled=scaled, multiple=4)(values)
        found = unscaled(found.movedim(-1, 1), scales) if scaled else found.movedim(-1, 1)
        assert found.shape == expected.shape
        assert ((found - expected).abs() <= 2**-11 * expected.abs()).all()


@pytest.mark.parametrize("layout", [torch.clone, last], ids=["first", "last"])
def test_positions_are_picked(layout):
    values = layout(torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0)))
    expected = functional.pad(values, (1, 1, 0, 0))[:, :, ::3, ::2]
    assert torch.equal(arranged(values, (3, 4), (0, 1), (3, 2)), expected)
    found, scales = scaled(values, (3, 4), (0, 1), (3, 2))
    assert ((unscaled(found, scales) - expected).abs() <= 2**-11 * expected.abs()).all()
    values[0, 0, 1, 0] = torch.inf  # which is not among them
    again, same = scaled(values, (3, 4), (0, 1), (3, 2))
    assert torch.equal(again, found)
    assert torch.equal(same, scales)


@pytest.mark.parametrize("layout", [torch.clone, last], ids=["first", "last"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 18, 3, 11), (1, 1, 2, 2, 2), (2, 4, 1), (0, 3, 4)])
def test_scaled_images_keep_11_bits(shape, layout):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if len(values):
        values[0, 0] = 0
        values[-1, -1] *= 1e30
        values[0, -1] *= 1e-30
    packed, scales = scaled(layout(values))
    assert packed.shape == values.shape
    assert scales.shape == values.shape[:2]
    assert (torch.frexp(scales).mantissa == 0.5).all()  # powers of two
    largest = packed.flatten(2).abs().amax(2)
    assert ((largest == 0) | (largest >= 2**13) & (largest <= 2**14)).all()
    assert ((unscaled(packed, scales) - values).abs() <= 2**-11 * values.abs()).all()
    padding = (1,) * (len(shape) - 2)
    padded, same = scaled(layout(values), None, padding)
    assert torch.equal(padded, functional.pad(packed, (1, 1) * len(padding)))
    assert torch.equal(same, scales)


def test_scaling_takes_extremes():
    values = torch.tensor([[[3e38, 1e30], [1.2e-38, 3e-38], [torch.inf, 1.0], [torch.nan, 1.0]]])
    packed, scales = scaled(values)
    found = unscaled(packed, scales)
    assert ((found[0, :2] - values[0, :2]).abs() <= 2**-11 * values[0, :2].abs()).all()
    assert found[0, 2, 0] == torch.inf
    assert found[0, 3, 0].isnan()
    assert scales.isfinite().all()


def test_tables_that_a_cuda_graph_reads_are_kept(monkeypatch):
    class OnGPU:
        is_cuda = True

    monkeypatch.setattr(images, "_captured", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    table = OnGPU()
    assert images.kept(table) is table
    assert not images._captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert images.kept(images.kept(table)) is table
    assert list(images._captured.values()) == [table]
    with pytest.raises(RuntimeError, match="run the same shapes eagerly once"):
        images.offsets((5,), (3,), (3,), (1,), (1,), torch.device("cuda"))
