"""Every wrong call says which argument, what was expected, what came."""

import pytest
import torch

import neuromanifold as nm

NAN, INF = float("nan"), float("inf")
GOOD = nm.Categorical(torch.zeros(3, 4))

CONSTRUCTION = {
    "nan": (
        lambda: nm.Categorical(torch.tensor([[0.0, 1.0], [0.0, NAN]])),
        ValueError,
        r"`logits`.*NaN at index \[1\]",
    ),
    "inf": (lambda: nm.Categorical(torch.tensor([[0.0, INF]])), ValueError, r"`logits`.*\+inf at index \[0\]"),
    "impossible": (lambda: nm.Categorical(torch.full((2, 3), -INF)), ValueError, "`logits`.*-inf for every class"),
    "integers": (lambda: nm.Categorical(torch.zeros(2, 3, dtype=torch.int64)), TypeError, "`logits`.*torch.int64"),
    "complex": (lambda: nm.Categorical(torch.zeros(2, 3, dtype=torch.complex64)), TypeError, "`logits`.*complex64"),
    "one class": (lambda: nm.Categorical(torch.zeros(5, 1)), ValueError, r"`logits`.*\[5, 1\].*nm.Bernoulli"),
    "no class": (lambda: nm.Categorical(torch.zeros(5, 0)), ValueError, r"`logits`.*\[5, 0\]"),
    "0-d": (lambda: nm.Categorical(torch.tensor(1.0)), ValueError, "`logits`.*0-d"),
    "list": (lambda: nm.Categorical([0.0, 1.0]), TypeError, "`logits`.*torch.Tensor, got list"),
    "sparse": (lambda: nm.Categorical(torch.eye(3).to_sparse()), TypeError, "`logits`.*dense.*to_dense"),
    "bernoulli nan": (lambda: nm.Bernoulli(torch.tensor([NAN])), ValueError, "`logits`.*NaN"),
    "bernoulli 0-d": (lambda: nm.Bernoulli(torch.tensor(0.0)), ValueError, "`logits`.*0-d"),
    "gaussian nan": (lambda: nm.Gaussian(torch.tensor([NAN])), ValueError, "`mean`.*finite"),
    "variance 0": (lambda: nm.Gaussian(torch.zeros(2), 0.0), ValueError, "`variance`.*positive"),
    "variance tiny": (lambda: nm.Gaussian(torch.zeros(2), 1e-45), ValueError, "`variance`.*positive"),
    "variance nan": (lambda: nm.Gaussian(torch.zeros(2), NAN), ValueError, "`variance`.*positive"),
    "variance shape": (lambda: nm.Gaussian(torch.zeros(2), torch.ones(3)), ValueError, r"`variance`.*\[2\].*\[3\]"),
    "variance type": (lambda: nm.Gaussian(torch.zeros(2), "1"), TypeError, "`variance`.*str"),
}

USE = {
    "v too short": (lambda: GOOD.matvec(torch.zeros(3, 3)), ValueError, r"`v`.*\[..., 4\].*\[3, 3\]"),
    "v other batch": (lambda: GOOD.matvec(torch.zeros(2, 4)), ValueError, r"`v`.*\[3\].*\[2, 4\]"),
    "v 0-d": (lambda: GOOD.matvec(torch.tensor(0.0)), ValueError, "`v`"),
    "v integers": (lambda: GOOD.matvec(torch.zeros(3, 4, dtype=torch.int64)), TypeError, "`v`.*int64"),
    "xi too long": (lambda: GOOD.factor(torch.zeros(3, 5)), ValueError, r"`xi`.*\[3, 5\]"),
    "y floats": (lambda: GOOD.score(torch.zeros(3)), TypeError, "`y`.*integer.*float32"),
    "y list": (lambda: GOOD.score([0, 1, 2]), TypeError, "`y`.*list"),
    "y shape": (lambda: GOOD.score(torch.zeros(2, dtype=torch.int64)), ValueError, r"`y`.*\[3\].*\[2\]"),
    "y one-hot": (lambda: GOOD.score(torch.zeros(3, 4, dtype=torch.int64)), ValueError, r"`y`.*\[3\].*\[3, 4\]"),
    "y 0-d": (lambda: GOOD.score(torch.tensor(1)), ValueError, r"`y`.*\[3\].*\[\]"),
    "y too large": (lambda: GOOD.score(torch.tensor([0, 1, 4])), ValueError, "`y`.*between 0 and 3.*0 to 4"),
    "y negative": (lambda: GOOD.score(torch.tensor([0, -100, 2])), ValueError, "`y`.*-100 to 2.*ignored"),
    "y for the error": (lambda: GOOD.empirical_error(torch.tensor([9, 0, 0])), ValueError, "`y`.*9"),
    "y for rank two": (lambda: GOOD.rank_two_fisher(torch.tensor([9, 0, 0])), ValueError, "`y`.*9"),
    "k 0": (lambda: GOOD.spectrum(0), ValueError, "`k`.*between 1 and 4.*got 0"),
    "k too large": (lambda: GOOD.spectrum(5), ValueError, "`k`.*between 1 and 4.*got 5"),
    "k float": (lambda: GOOD.spectrum(2.0), TypeError, "`k`.*an int.*float"),
    "k bool": (lambda: GOOD.spectrum(True), TypeError, "`k`.*an int.*bool"),
    "rank 0": (lambda: GOOD.lower_envelope(0), ValueError, "`rank`.*got 0"),
    "rank for errors": (lambda: GOOD.envelope_errors(5), ValueError, "`rank`.*got 5"),
    "shape int": (lambda: GOOD.sample(None, 5), TypeError, r"`shape`.*\(5,\).*got 5"),
    "shape float": (lambda: GOOD.sample(None, (2.0,)), TypeError, "`shape`"),
    "shape negative": (lambda: nm.Gaussian(torch.zeros(2)).sample(None, (-1,)), ValueError, "`shape`.*-1"),
    "generator": (lambda: nm.Bernoulli(torch.zeros(2)).sample((3,)), TypeError, "`generator`.*tuple.*shape"),
    "bernoulli k": (lambda: nm.Bernoulli(torch.zeros(3, 4)).spectrum(5), ValueError, "`k`.*got 5"),
    "bernoulli y": (lambda: nm.Bernoulli(torch.zeros(4)).score(torch.tensor([0, 1, 2, 0])), ValueError, "`y`.*0 to 2"),
    "bernoulli y shape": (lambda: nm.Bernoulli(torch.zeros(4)).score(torch.zeros(3)), ValueError, r"`y`.*\[3\]"),
    "gaussian y": (lambda: nm.Gaussian(torch.zeros(4)).score(torch.zeros(3)), ValueError, r"`y`.*\[3\]"),
}


@pytest.mark.parametrize("name", [*CONSTRUCTION, *USE])
def test_bad_input_gets_a_clear_error(name: str) -> None:
    call, error, message = {**CONSTRUCTION, **USE}[name]
    with pytest.raises(error, match=message):
        call()


def test_validation_can_be_switched_off() -> None:
    assert nm.Categorical(torch.tensor([0.0, NAN]), validate=False).probs.isnan().all()
