"""Every method gives the same on every device that there is, and stays there."""

import pytest
import torch

import neuromanifold as nm
from tests.core.problems import PROBLEMS

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def everything(core: nm.Categorical, seed: int) -> dict[str, torch.Tensor]:
    """Each method's result by name (eigenvectors as the matrices they make, which ties leave alone)."""
    v = torch.linspace(-1, 1, core.dim, dtype=core.dtype, device=core.device)
    y = torch.arange(len(core.probs), device=core.device) % core.dim
    named = {"bounds": core.largest_eigenvalue_bounds(), "errors": core.envelope_errors(1)}
    named |= {"worst": core.empirical_error_bound()[1:], "variance": core.score_variance()[:1]}
    results = {f"{name} {i}": tensor for name, tensors in named.items() for i, tensor in enumerate(tensors)}
    spectrum = core.spectrum(core.dim)
    generator = torch.Generator(core.device).manual_seed(seed)
    assert core.sample(generator, (2,)).device.type == core.device.type
    return results | {
        "fisher": core.fisher(),
        "matvec": core.matvec(v),
        "factor": core.factor(v),
        "factor_transpose": core.factor_transpose(v),
        "score": core.score(y),
        "trace": core.trace(),
        "eigenvalues": spectrum.values,
        "spectrum": spectrum.dense(),
        "gram": spectrum.vectors @ spectrum.vectors.mT,
        "empirical_error": core.empirical_error(y),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_method_equals_the_cpu_in_float64(name: str, device: str, dtype: torch.dtype) -> None:
    logits = PROBLEMS[name].to(dtype)
    reference = everything(nm.Categorical(logits.double()), seed=0)
    spread = float((logits.amax(-1) - logits[logits > -torch.inf].amin()).amax())
    rtol = torch.finfo(dtype).eps * (100 + 4 * spread)  # exp(z - max) has the relative error eps·|z - max|
    for key, result in everything(nm.Categorical(logits.to(device)), seed=0).items():
        assert result.device.type == device
        assert torch.isfinite(result).all()
        # Eigenvalues and their sum are accurate relatively, each on its own; the rest against 1, the scale of p.
        relative = key in ("eigenvalues", "trace")
        atol = 100 * torch.finfo(dtype).tiny if relative else 10 * torch.finfo(dtype).eps
        message = lambda text, key=key: f"{key}: {text}"  # noqa: E731
        torch.testing.assert_close(result.cpu().double(), reference[key], rtol=rtol, atol=atol, msg=message)


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_repeats_on_each_device(device: str) -> None:
    core = nm.Categorical(torch.zeros(5, 7, device=device))
    first = core.sample(torch.Generator(device).manual_seed(1), (3,))
    assert torch.equal(first, core.sample(torch.Generator(device).manual_seed(1), (3,)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [nm.Bernoulli, nm.Gaussian])
def test_diagonal_cores_run_on_each_device(device: str, make: type[nm.Bernoulli] | type[nm.Gaussian]) -> None:
    core = make(torch.linspace(-3, 3, 12, device=device).view(3, 4))
    y = core.sample(torch.Generator(device).manual_seed(0), (5,))
    assert core.score(y).device.type == core.spectrum(2).vectors.device.type == device
