"""Every family of the zoo, variants drawn at random: right, or refused with advice; never silently wrong."""

import zlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, note, seed, settings

import neuromanifold as nm
from tests.zoo.case import Kind, Spec, make, specs
from tests.zoo.families import FAMILIES
from tests.zoo.reference import judge_all, judge_mixing

ALONE = [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds if family != "mixing"]
MIXED = list(FAMILIES["mixing"])


def drawn(kind: str, examples: int, check: Callable[[Spec], None], fewest: int = 1) -> None:
    """Check specs of a kind: other ones for each kind, the same in each run unless it is to explore."""
    test = settings(max_examples=examples)(given(spec=specs(kind, fewest))(check))
    (seed(zlib.crc32(kind.encode()))(test) if settings.default.derandomize else test)()


def right_or_refused(kinds: dict[str, Kind]) -> Callable[[Spec], None]:
    def check(spec: Spec) -> None:
        found = judge_all(spec, kinds)
        note(str(make(spec, kinds).chosen))
        assert all(verdict.fine for verdict in found.values()), found

    return check


def warned_of(kinds: dict[str, Kind]) -> Callable[[Spec], None]:
    def check(spec: Spec) -> None:
        note(str(make(spec, kinds).chosen))
        for estimator in (None, nm.Exact(), nm.Empirical(), nm.MonteCarlo()):
            verdict = judge_mixing(spec, kinds, estimator)
            assert verdict.fine, (estimator, verdict)

    return check


@pytest.mark.parametrize(("family", "kind"), ALONE, ids=[f"{family}: {kind}" for family, kind in ALONE])
def test_right_or_refused(family: str, kind: str) -> None:
    drawn(kind, 3, right_or_refused(FAMILIES[family]))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), ALONE, ids=[f"{family}: {kind}" for family, kind in ALONE])
def test_many_are_right_or_refused(family: str, kind: str) -> None:
    drawn(kind, 60, right_or_refused(FAMILIES[family]))


@pytest.mark.parametrize("kind", MIXED)
def test_samples_that_influence_each_other_are_told(kind: str) -> None:
    drawn(kind, 5, warned_of(FAMILIES["mixing"]), fewest=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXED)
def test_many_samples_that_influence_each_other_are_told(kind: str) -> None:
    drawn(kind, 60, warned_of(FAMILIES["mixing"]), fewest=2)


@pytest.mark.parametrize("kind", list(FAMILIES["derivatives"]))
def test_a_check_does_not_call_parameters_unused_that_an_inner_derivative_uses(kind: str) -> None:
    spec = Spec(kind, (3, 3), 3, 3, 3, (0, 0, 0, 0, 0), 1, torch.float64)
    case = make(spec, FAMILIES["derivatives"])
    result = nm.check(case.model, case.data(), estimators=[nm.Hutchinson()])
    named = dict(case.model.named_parameters())
    for inputs, _ in case.data():
        logits = case.model(*inputs) if isinstance(inputs, tuple) else case.model(inputs)
        for c in range(logits.shape[-1] - 1):  # a shift of all logits has no Fisher information
            contrast = (logits[..., c] - logits[..., -1]).sum()
            found = torch.autograd.grad(contrast, list(named.values()), retain_graph=True, allow_unused=True)
            used = {name for name, g in zip(named, found, strict=True) if g is not None and bool((g != 0).any())}
            assert not used & set(result.zero)
