"""Arguments, parsed and checked before a model is loaded: estimators as Python writes them, shards, output files."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, get_args

from neuromanifold import estimators as nm
from neuromanifold.core import Bernoulli, Categorical, Gaussian
from neuromanifold.core.checks import message
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.results.files import check_destination
from neuromanifold.run.settings import Granularity

_ESTIMATORS = (nm.Hutchinson, nm.Adaptive, nm.Exact, nm.MonteCarlo, nm.Empirical, nm.SquaredBatchGradient)
_BY_NAME: dict[str, Any] = {kind.__name__.lower(): kind for kind in (*_ESTIMATORS, nm.Upper, nm.Lower)}
_LIKELIHOODS: dict[str, Likelihood] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def parse_estimator(text: str) -> nm.Estimator:
    """Return the estimator; only names of estimators and literals are understood, and nothing is evaluated."""
    known = ", ".join(kind.__name__ for kind in _ESTIMATORS)
    expected, got = f"one of {known}, perhaps with settings such as Hutchinson(probes=4)", repr(text)
    name = text.replace("-", "")  # such as monte-carlo
    with suppress(SyntaxError, KeyError):
        try:
            made = _build(ast.parse(name if name.isalpha() else text, mode="eval").body)
            if isinstance(made, nm.Estimator):
                return made
        except TypeError as error:  # a setting that the estimator does not have
            got = f"{text!r} ({error})"
    raise ValueError(message("estimator", expected, got))


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
    """Return the likelihood of that name; by default that of the model's config."""
    if text is None:
        return default
    if text.lower() not in _LIKELIHOODS:
        raise ValueError(message("likelihood", f"one of {', '.join(_LIKELIHOODS)}", repr(text)))
    return _LIKELIHOODS[text.lower()]


def parse_granularity(text: str) -> Granularity:
    """Return the granularity, if it is one."""
    if text not in get_args(Granularity):
        raise ValueError(message("granularity", "auto, sample or batch", repr(text)))
    return cast(Granularity, text)


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """Return (i, n) for "i/n", such as "0/4" for the first of four shards."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(message("shard", "I/N with I from 0 to N-1, such as 0/4 and 3/4", repr(text)))
    return int(found[1]), int(found[2])


def check_output(path: Path, *inputs: Path | str | None) -> None:
    """Raise an error if the file cannot be written, or is one that the command reads or keeps for later."""
    check_destination(path)
    if any(path.resolve() == Path(other).resolve() for other in inputs if other is not None):
        raise ValueError(message("output", "a file of its own", f"{path}, which is given for something else as well"))


def check_creatable(path: Path) -> None:
    """Raise an error if the file cannot be written, even with the folders created that it is to be in."""
    first = path.absolute()
    while not first.parent.exists():
        first = first.parent
    if not first.parent.is_dir():
        raise NotADirectoryError(f"{first.parent} is a file; name a folder to write to.")
    check_destination(first)
