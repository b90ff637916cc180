"""The promised accuracy against simulated runs, and against the closed forms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuromanifold import bounds
from tests.zscores import allowed_z_score

METHODS: tuple[Any, ...] = ("chi2", "normal", "chebyshev", "cantelli")
RUNS = 20_000


def simulated(noise: str, batches: int, probes: int, samples: int = 64, seed: int = 0) -> torch.Tensor:
    """F̂/F [RUNS] of runs over `batches` batches of `samples` samples that contribute equally, one output each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (RUNS, batches * probes)
    if noise == "gaussian":  # a sum of Gaussians is one
        gradients = torch.randn(shape, generator=generator, dtype=torch.float64)
    else:  # a sum of signs is twice a binomial number, shifted
        binomial = torch.binomial(torch.full(shape, float(samples)), torch.full(shape, 0.5), generator=generator)
        gradients = (2 * binomial.double() - samples) / math.sqrt(samples)
    return gradients.square().mean(-1)


def z_score(hits: torch.Tensor, probability: float) -> float:
    """How far the observed frequency lies above a probability, in standard errors."""
    return (float(hits.double().mean()) - probability) / math.sqrt(probability * (1 - probability) / len(hits))


# -------------------------------------------------------------------------------------------------- simulation


@pytest.mark.parametrize(
    ("rtol", "confidence", "probes"), [(0.3, 0.9, 1), (0.5, 0.95, 3), (1.5, 0.9, 1), (0.2, 0.8, 2)]
)
def test_chi2_is_exact_for_gaussian_noise(rtol: float, confidence: float, probes: int) -> None:
    """False-alarm rate 1e-6.  The biased twin, half as many batches, is seen to break the promise."""
    batches, allowed = bounds.batches_needed(rtol, confidence, probes), allowed_z_score(1)
    hits = (simulated("gaussian", batches, probes) - 1).abs() <= rtol
    assert z_score(hits, confidence) > -allowed
    assert abs(z_score(hits, bounds.expected_confidence(batches, rtol, probes))) < allowed
    twin = (simulated("gaussian", batches // 2, probes) - 1).abs() <= rtol
    assert z_score(twin, confidence) < -allowed


@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_its_promise(noise: str, method: Any) -> None:
    """False-alarm rate 1e-6.  The lattice of 64 signs costs Rademacher noise a per cent at the interval's ends."""
    rtol, confidence = 0.3, 0.9
    ratio = simulated(noise, bounds.batches_needed(rtol, confidence, method=method), probes=1)
    hits = ratio - 1 <= rtol if method == "cantelli" else (ratio - 1).abs() <= rtol
    assert z_score(hits, confidence - 0.01) > -allowed_z_score(1)


@pytest.mark.parametrize(("batches", "probes"), [(1, 1), (7, 1), (10, 4)])
def test_the_standard_error_is_the_expected_one(batches: int, probes: int) -> None:
    """False-alarm rate 1e-6 for (F̂/F - 1)² against 2/n; twice the probes is the twin."""
    for noise, variance in (("gaussian", 2.0), ("rademacher", 2 - 2 / 64)):
        squares = (simulated(noise, batches, probes) - 1).square()
        spread = float(squares.std()) / math.sqrt(RUNS)
        assert abs(float(squares.mean()) - variance / (batches * probes)) / spread < allowed_z_score(1)
        bound = bounds.expected_rtol(batches, probes) ** 2
        assert float(squares.mean()) < bound + allowed_z_score(1) * spread
        twin = bounds.expected_rtol(batches, 2 * probes) ** 2
        assert float(squares.mean()) > twin + allowed_z_score(1) * spread


# ------------------------------------------------------------------------------------------------ closed forms


def test_familiar_numbers() -> None:
    assert bounds.batches_needed(0.1) == 200
    assert bounds.batches_needed(0.1, probes=8) == 25
    assert bounds.batches_needed(10) == 1
    assert bounds.batches_needed(0.1, 0.95, method="normal") == math.ceil(200 * 1.959963984540054**2)
    assert bounds.batches_needed(0.1, 0.95, method="chebyshev") == 4000
    assert bounds.batches_needed(0.1, 0.95, method="cantelli") == 3800
    assert bounds.expected_rtol(200) == pytest.approx(0.1)
    assert bounds.expected_confidence(4, 10.0, method="chebyshev") == pytest.approx(0.995)
    assert bounds.expected_confidence(1, 0.1, method="chebyshev") == 0


@pytest.mark.parametrize("rtol", [0.01, 0.5, 1.0, 3.0])
def test_chi2_in_closed_form(rtol: float) -> None:
    """χ²_1 is a squared normal, χ²_2 is exponential."""
    low, high = max(0.0, 1 - rtol), 1 + rtol
    one = math.erf(math.sqrt(high / 2)) - math.erf(math.sqrt(low / 2))
    two = math.exp(-low) - math.exp(-high)
    assert bounds.expected_confidence(1, rtol) == pytest.approx(one, rel=1e-12)
    assert bounds.expected_confidence(2, rtol) == pytest.approx(two, rel=1e-12)
    assert bounds.expected_confidence(1, rtol, probes=2) == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize("rtol", [0.03, 1e-2, 1e-3, 1e-4])
def test_chi2_tends_to_normal(rtol: float) -> None:
    for confidence in (0.5, 0.95, 0.999):
        chi2, normal = (bounds.batches_needed(rtol, confidence, method=method) for method in ("chi2", "normal"))
        assert abs(chi2 / normal - 1) < 3 * rtol


@given(st.floats(1e-3, 5), st.integers(1, 1000))
def test_the_chance_grows_with_the_batches(rtol: float, batches: int) -> None:
    """Which makes the least number of batches that is enough the one that a bisection finds."""
    for method in METHODS:
        one, more = (bounds.expected_confidence(n, rtol, method=method) for n in (batches, batches + 1))
        assert one <= more + 1e-14


@given(st.floats(0.01, 2), st.floats(0.01, 0.99), st.integers(1, 20), st.sampled_from(METHODS))
def test_the_number_is_the_least_that_is_enough(rtol: float, confidence: float, probes: int, method: Any) -> None:
    batches = bounds.batches_needed(rtol, confidence, probes, method)
    assert bounds.expected_confidence(batches, rtol, probes, method) >= confidence - 1e-12
    if batches > 1:
        assert bounds.expected_confidence(batches - 1, rtol, probes, method) < confidence


@given(st.integers(1, 10**9), st.integers(1, 100))
def test_inverse_functions(batches: int, probes: int) -> None:
    assert bounds.batches_needed(bounds.expected_rtol(batches, probes), probes=probes) == batches


@given(st.floats(1e-6, 10), st.integers(1, 100))
def test_enough_batches_meet_the_standard_error(rtol: float, probes: int) -> None:
    batches = bounds.batches_needed(rtol, probes=probes)
    assert bounds.expected_rtol(batches, probes) <= rtol * (1 + 1e-12)
    if batches > 1:
        assert bounds.expected_rtol(batches - 1, probes) > rtol


@given(st.floats(0.01, 1), st.floats(0.05, 0.99))
def test_fewer_assumptions_cost_more(rtol: float, confidence: float) -> None:
    needed = {method: bounds.batches_needed(rtol, confidence, method=method) for method in METHODS}
    assert needed["normal"] <= needed["chebyshev"]
    assert needed["cantelli"] <= needed["chebyshev"]


# --------------------------------------------------------------------------------------------------- bad input

BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: bounds.batches_needed(0.0), ValueError, "`rtol` must be a number > 0"),
    (lambda: bounds.batches_needed(math.nan), ValueError, "`rtol` must be a number > 0, got nan"),
    (lambda: bounds.batches_needed("5%"), ValueError, "`rtol` must be a number.*0.05 asks"),  # type: ignore[arg-type]
    (lambda: bounds.batches_needed(1e-12), ValueError, "`rtol` .*Use nm.Exact"),
    (lambda: bounds.batches_needed(1e-9, 0.9), ValueError, "`rtol` .*Use nm.Exact"),
    (lambda: bounds.batches_needed(0.1, 1.0), ValueError, "`confidence` must be None or between 0 and 1"),
    (lambda: bounds.batches_needed(0.1, 95), ValueError, "`confidence` .* got 95"),
    (lambda: bounds.batches_needed(0.1, True), ValueError, "`confidence`"),
    (lambda: bounds.batches_needed(0.1, probes=0), ValueError, "`probes` must be between 1"),
    (
        lambda: bounds.batches_needed(0.1, method="t"),
        ValueError,
        "`method` must be 'chi2', 'normal', 'chebyshev' or 'cantelli'",
    ),  # type: ignore[arg-type]
    (lambda: bounds.expected_rtol(0), ValueError, "`batches` must be between 1"),
    (lambda: bounds.expected_rtol(2.5), TypeError, "`batches` must be an int"),  # type: ignore[arg-type]
    (lambda: bounds.expected_confidence(3, -0.1), ValueError, "`rtol` must be a number > 0"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_named(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
