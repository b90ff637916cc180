"""An estimator as text: `hutchinson`, or as Python writes it, `Hutchinson(probes=4)`."""

from __future__ import annotations

import ast
from typing import Any, cast, get_args

from neuromanifold.core import Bernoulli, Categorical, Gaussian
from neuromanifold.core.checks import message
from neuromanifold.estimators import (
    Empirical,
    Estimator,
    Exact,
    Hutchinson,
    Lower,
    MonteCarlo,
    SquaredBatchGradient,
    Upper,
)
from neuromanifold.problem.validation import Likelihood
from neuromanifold.run.granularity import Granularity

ESTIMATORS = (Hutchinson, Exact, MonteCarlo, Empirical, SquaredBatchGradient)
_ENVELOPES = (Upper, Lower)
_BY_NAME: dict[str, Any] = {kind.__name__.lower(): kind for kind in (*ESTIMATORS, *_ENVELOPES)}
LIKELIHOODS: dict[str, Likelihood] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def parse_estimator(text: str) -> Estimator:
    """Only names of estimators and plain values are understood; nothing is evaluated."""
    known = ", ".join(kind.__name__ for kind in ESTIMATORS)
    expected = f"one of {known}, perhaps with settings such as Hutchinson(probes=4)"
    try:
        made = _build(ast.parse(text.replace("-", "") if text.replace("-", "").isalpha() else text, mode="eval").body)
    except (SyntaxError, KeyError) as error:
        raise ValueError(message("estimator", expected, repr(text))) from error
    except TypeError as error:  # a setting that it does not have
        raise ValueError(message("estimator", expected, f"{text!r} ({error})")) from error
    if not isinstance(made, Estimator):
        raise ValueError(message("estimator", expected, repr(text)))
    return made


def _build(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _BY_NAME[node.id.lower()]()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        settings = {keyword.arg or "": _build(keyword.value) for keyword in node.keywords}
        return _BY_NAME[node.func.id.lower()](*map(_build, node.args), **settings)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise KeyError(ast.unparse(node)) from None


def parse_likelihood(text: str | None, default: Likelihood) -> Likelihood:
    """By name; by default what the model's config says."""
    if text is None:
        return default
    if text.lower() not in LIKELIHOODS:
        raise ValueError(message("likelihood", f"one of {', '.join(LIKELIHOODS)}", repr(text)))
    return LIKELIHOODS[text.lower()]


def parse_granularity(text: str) -> Granularity:
    """What is squared."""
    if text not in get_args(Granularity):
        raise ValueError(message("granularity", "auto, sample or batch", repr(text)))
    return cast(Granularity, text)
