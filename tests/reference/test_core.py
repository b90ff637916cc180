"""The references against each other: three ways to the same numbers."""

import torch

import neuromanifold as nm
from neuromanifold.reference.core import fisher_by_definition, spectrum_by_eigh, spectrum_by_power_iteration

Z = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_fisher_by_definition_is_the_hessian_of_the_divergence() -> None:
    """KL(p(z) ‖ p(z + δ)) = ½ δᵀFδ + O(δ³): the meaning of a Fisher information."""
    z = Z[0]

    def divergence(shift: torch.Tensor) -> torch.Tensor:
        log_p = z.log_softmax(-1)
        return (log_p.exp() * (log_p - (z + shift).log_softmax(-1))).sum()

    hessian = torch.autograd.functional.hessian(divergence, torch.zeros_like(z))
    torch.testing.assert_close(fisher_by_definition(z), hessian)


def test_power_iteration_converges_given_time() -> None:
    core = nm.Categorical(3 * Z)
    exact = spectrum_by_eigh(core.fisher(), 2)
    generator = torch.Generator().manual_seed(0)
    patient = spectrum_by_power_iteration(core.probs, 2, iterations=3000, generator=generator)
    torch.testing.assert_close(patient.values, exact.values)
    torch.testing.assert_close(patient.dense(), exact.dense())


def test_thirty_power_iterations_are_not_enough_near_uniform() -> None:
    """What the secular equation is for: errors of several per cent, against rounding."""
    core = nm.Categorical(0.1 * torch.randn(256, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    values = spectrum_by_power_iteration(core.probs, 1, generator=torch.Generator().manual_seed(1)).values
    error = (values / core.spectrum(1).values - 1).abs()
    assert error.max() > 0.05
