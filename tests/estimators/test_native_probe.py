"""The deflated probe in C: the same noise gives what torch's operations give in float64, whatever the shape."""

import math
import shutil
import subprocess

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.kernels import dispatch
from neuromanifold.kernels.c import build, probe

INF, NAN = math.inf, math.nan
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
ROWS = {
    "peaked": [4.0, 1.0, 0.5, -1.0, -2.0],
    "saturated": [-29.0, 1.0, -28.0, -30.0],
    "one-hot": [0.0, 60.0, 1.0],
    "beyond float32": [0.0, 200.0, 1.0],
    "no second class": [0.0, 2000.0, 1.0],
    "subnormal": [0.0, 88.0, -1.0, -14.0],
    "uniform": [1.0] * 5,
    "tie at the top": [2.0, -1.0, 2.0, 0.0],
    "tie of three": [3.0, 3.0, 0.0, 3.0],
    "near tie": [1.0, 1.001, 0.0],
    "tie below": [3.0, 1.0, 1.0, 0.0],
    "impossible": [1.0, -INF, 0.0, -INF, -1.0],
    "one possible": [-INF, 2.0, -INF],
    "two classes": [0.5, 1.0],
    "two tied classes": [1.0, 1.0],
    "two classes, one-hot": [0.0, 200.0],
}
SHAPES = [(0, 3), (1, 2), (1, 10), (64, 10), (7, 100), (33, 1000), (2, 3, 5), (4, 0, 7), (40, 513)]


@pytest.fixture(autouse=True)
def wanted(monkeypatch):
    monkeypatch.delenv("NEUROMANIFOLD_KERNELS", raising=False)
    assert build.kernel(probe.SOURCE, "probe") is not None


def drawn(logits: Tensor, seed: int = 5, **options) -> Tensor:
    estimator, generator = nm.Hutchinson(**options), torch.Generator().manual_seed(seed)
    return torch.stack(list(estimator.cotangents(nm.Categorical(logits), None, generator)))


def by_torch(logits: Tensor, monkeypatch, **options) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setenv("NEUROMANIFOLD_KERNELS", "0")
        return drawn(logits, **options)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    error = torch.linalg.vector_norm(found.double() - expected, dim=-1)
    return bool((error <= tolerance * torch.linalg.vector_norm(expected, dim=-1)).all())


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_noise_same_probe(shape, scale, monkeypatch):
    logits = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert close(drawn(logits), by_torch(logits.double(), monkeypatch), 2e-5)  # softmax in float32 is as far off
    assert close(drawn(logits), by_torch(logits, monkeypatch).double(), 3e-6)
    assert close(drawn(logits.double()), by_torch(logits.double(), monkeypatch), 1e-12)
    if logits.numel():
        assert not close(drawn(logits), by_torch(logits, monkeypatch, seed=6).double(), 0.1)


@pytest.mark.parametrize("noise", ["rademacher", "gaussian"])
@pytest.mark.parametrize("name", ROWS)
def test_special_distributions(name, noise, monkeypatch):
    row = torch.tensor(ROWS[name])
    logits = torch.stack([row, row.flip(0), row.roll(1)])
    options = {"noise": noise, "probes": 3, "orthogonal": False}
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.float64, 1e-12), (torch.bfloat16, 3e-6)):
        expected = by_torch(logits.to(dtype), monkeypatch, **options)
        assert close(drawn(logits.to(dtype), **options), expected.double(), tolerance)


def test_only_tied_distributions_are_left_to_torch(monkeypatch):
    rows = torch.tensor([[2.0, -1.0, 2.0, 0.0], [2.0, -1.0, 1.0, 0.0], [0.0] * 4, [3.0, 1.0, 1.0, 1.0]])
    assert dispatch.deflated_probe(rows, torch.ones(4, 5)).left_out.tolist() == [True, False, True, False]
    assert close(drawn(rows), by_torch(rows, monkeypatch).double(), 3e-6)


@pytest.mark.parametrize("row", [[NAN, 1.0, 2.0], [1.0, INF, 2.0], [-INF, -INF, -INF], [1.0, 2.0, NAN]], ids=str)
def test_logits_that_are_not_finite_are_left_out(row):
    good = torch.tensor([[1.0, 2.0, 3.0], [1.0, -INF, 2.0]])
    logits, generator = torch.cat([good, torch.tensor([row])]), torch.Generator()
    with pytest.raises(ValueError, match=r"at index \[2\]"):
        nm.Categorical(logits)
    (found,) = nm.Hutchinson().cotangents(nm.Categorical(logits, validate=False), None, generator)
    assert found[:2].isfinite().all()
    assert not found[2].isfinite().any()


def test_it_is_what_a_probe_comes_from(monkeypatch):
    """And it is not called where torch has to record or to transform what is done, or where kernels are unwanted."""
    calls = []
    run = probe.call_deflated_probe
    monkeypatch.setattr(probe, "call_deflated_probe", lambda *given: calls.append(run(*given)) or calls[-1])
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    drawn(logits)
    assert len(calls) == 1
    by_torch(logits, monkeypatch)
    drawn(logits.clone().requires_grad_())
    drawn(logits.bfloat16())
    assert len(calls) == 1
    with dispatch.disabled("deflated_probe"):
        drawn(logits)
    torch.func.vmap(lambda z: z.sum() * (dispatch.deflated_probe(z, z) is None))(logits)
    assert len(calls) == 1


@pytest.mark.parametrize("wish", ["0", "1"])
def test_a_run_says_what_is_wrong_with_logits(wish, monkeypatch):
    monkeypatch.setenv("NEUROMANIFOLD_KERNELS", wish)
    good = torch.zeros(2, 3)
    bad = torch.tensor([[1.0, 2.0, 3.0], [NAN, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"Batch 1 of `data`: .*NaN at index \[1\]"):
        nm.fisher_diagonal(torch.nn.Linear(3, 4), [good, bad], nm.Hutchinson())


def test_probes_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(probe, "_ALONE", 0)
    logits, found, threads = torch.randn(50, 30), [], torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(drawn(logits))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("flags", [[], ["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2", "-mno-avx"]], ids=str)
def test_other_processors(flags, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", " ".join(["cc", *flags]))
    build._library.cache_clear()
    try:
        if build.kernel(probe.SOURCE, "probe") is None:
            pytest.skip("flags of another processor")
        logits = torch.randn(9, 37, generator=torch.Generator().manual_seed(0))
        assert close(drawn(logits), by_torch(logits, monkeypatch).double(), 3e-6)
    finally:
        build._library.cache_clear()


def test_the_source_has_no_warnings(tmp_path):
    flags = ["-Wall", "-Wextra", "-Wshadow", "-Werror", "-O3", "-shared", "-fPIC", "-lm"]
    subprocess.run(["cc", *flags, "-o", tmp_path / "a.so", probe.SOURCE], check=True)


def test_another_default_device_does_not_matter():
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    noise = torch.ones(4, 6)
    expected = dispatch.deflated_probe(logits, noise).cotangent
    with torch.device("meta"):
        found = dispatch.deflated_probe(logits, noise)
    assert found.left_out is None
    assert torch.equal(found.cotangent, expected)


def test_logits_that_are_to_be_negated():
    """Such a view has the memory of what it is the negative of."""
    logits, noise = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.ones(4, 6)
    found, expected = (dispatch.deflated_probe(z, noise).cotangent for z in (torch._neg_view(logits), -logits))
    assert torch.equal(found, expected)
